"""Makes the double what ``import tensorrt_llm`` finds: the modules and names of the contract's ``imports``."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from trtllm_double.arguments import CapacitySchedulerPolicy, CudaGraphConfig, KvCacheConfig, SchedulerConfig
from trtllm_double.contract import CONTRACT
from trtllm_double.llm import LLM, AsyncLLM
from trtllm_double.memory import ExecutorMemoryType, SleepConfig
from trtllm_double.sampling import SamplingParams
from trtllm_double.worker import WorkerExtension, get_device_uuid

OBJECTS: dict[str, Any] = {
    "ExecutorMemoryType": ExecutorMemoryType,
    "get_device_uuid": get_device_uuid,
    **{kind.__name__: kind for kind in (LLM, AsyncLLM, SamplingParams, SleepConfig, WorkerExtension)},
    **{k.__name__: k for k in (CapacitySchedulerPolicy, CudaGraphConfig, KvCacheConfig, SchedulerConfig)},
}


def install() -> None:
    """Put the modules in ``sys.modules``; KeyError for a name of the contract that the double lacks."""
    for name in ("tensorrt_llm._torch", *CONTRACT["imports"]):
        module = sys.modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        vars(module).update({each: OBJECTS[each] for each in CONTRACT["imports"].get(name, ())})
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], last, module)
    vars(sys.modules["tensorrt_llm"]).update(__version__="1.3.0", _torch=sys.modules["tensorrt_llm._torch"])
