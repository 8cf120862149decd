"""Which names each module of the double has: those of the contract's ``imports``."""

from __future__ import annotations

from typing import Any, Final

from trtllm_double.arguments import CapacitySchedulerPolicy, CudaGraphConfig, KvCacheConfig, SchedulerConfig
from trtllm_double.contract import CONTRACT
from trtllm_double.llm import LLM, AsyncLLM
from trtllm_double.memory import ExecutorMemoryType, SleepConfig
from trtllm_double.sampling import SamplingParams
from trtllm_double.worker import WorkerExtension, get_device_uuid

VERSION: Final = "1.3.0"

_OBJECTS: Final[dict[str, Any]] = {
    "AsyncLLM": AsyncLLM,
    "CapacitySchedulerPolicy": CapacitySchedulerPolicy,
    "CudaGraphConfig": CudaGraphConfig,
    "ExecutorMemoryType": ExecutorMemoryType,
    "KvCacheConfig": KvCacheConfig,
    "LLM": LLM,
    "SamplingParams": SamplingParams,
    "SchedulerConfig": SchedulerConfig,
    "SleepConfig": SleepConfig,
    "WorkerExtension": WorkerExtension,
    "get_device_uuid": get_device_uuid,
}


def offer(module: str, namespace: dict[str, Any]) -> None:
    """Put what the contract lists for ``module`` into its namespace; KeyError for what the double lacks."""
    namespace.update({name: _OBJECTS[name] for name in CONTRACT["imports"][module]})
