"""One engine and all that is asked of it: in the trainer's process, or as an actor of Ray near the engine's workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rlplug_rollout_trtllm.environment import VERSIONS, engine_environment
from rlplug_rollout_trtllm.placement import Bundles
from rlplug_rollout_trtllm.sampling import Output
from rlplug_rollout_trtllm.surface import SLEEPING_CACHE, SLEEPING_WEIGHTS

ABORT_INTERVAL_S: Final = 0.2
CLOSE_S: Final = 60.0

RESET: Final = ("collective_rpc", "reset_prefix_cache")
"""Call that empties the cache of prompts."""
UNKNOWN_ARGUMENT: Final = (
    "If it does not know an argument: python -m rlplug_rollout_trtllm.smoke --surface-only says what differs."
)


class EngineHost:
    """Holds TensorRT-LLM's ``AsyncLLM``. Every method runs in one event loop, and takes and returns plain data."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._results: dict[str, Any] = {}

    async def start(
        self, arguments: Mapping[str, Any], bundles: Bundles, sleeps: bool, devices: str | None = None
    ) -> str:
        """Build the engine, with a worker in each bundle, and return its version.

        ``arguments`` are those of ``TRTLLMOptions``; ``devices`` is ``CUDA_VISIBLE_DEVICES`` of the workers, if given.
        """
        with engine_environment(devices):
            version = VERSIONS.require_module("tensorrt_llm")
            from tensorrt_llm import AsyncLLM

            engine = AsyncLLM(
                placement_groups=[bundles.group],
                placement_bundle_indices=[bundles.indices],
                per_worker_gpu_share=1.0,
                **_configured(arguments, sleeps),
            )
            await engine.setup_async()
        self._engine = engine
        return str(version)

    # ---- requests -------------------------------------------------------------------------------------------------

    async def generate(self, name: str, prompt_ids: Sequence[int], sampling: Mapping[str, Any]) -> Output:
        """Return what is generated for one request, which no other has the ``name`` of."""
        from tensorrt_llm import SamplingParams

        result = self._engine.generate_async(inputs=list(prompt_ids), sampling_params=SamplingParams(**sampling))
        self._results[name] = result
        try:
            return Output.of(await result)
        finally:
            del self._results[name]

    async def abort(self, names: Sequence[str]) -> None:
        """Stop requests. An abort that overtakes its request is lost, so it is said until that has ended."""
        while running := [self._results[name] for name in names if name in self._results]:
            for result in running:
                result.abort()
            await asyncio.sleep(ABORT_INTERVAL_S)

    async def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call another method of ``AsyncLLM``; return what workers return."""
        result = await getattr(self._engine, method)(*arguments, **keywords)
        return result if method == "collective_rpc" else None

    async def address(self) -> str:
        """Return the address of this host in Ray's cluster."""
        import ray

        return str(ray.util.get_node_ip_address())

    async def close(self) -> None:
        """End the engine and its workers; safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


def _configured(arguments: Mapping[str, Any], sleeps: bool) -> dict[str, Any]:
    """Return arguments with their configurations as the engine's own classes."""
    from tensorrt_llm.llmapi import CapacitySchedulerPolicy, CudaGraphConfig, KvCacheConfig, SchedulerConfig
    from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType, SleepConfig

    configured = {**arguments, "kv_cache_config": KvCacheConfig(**arguments["kv_cache_config"])}
    graphs = arguments["cuda_graph_config"]
    configured["cuda_graph_config"] = None if graphs is None else CudaGraphConfig(**graphs)
    if scheduler := arguments.get("scheduler_config"):
        policy = getattr(CapacitySchedulerPolicy, scheduler["capacity_scheduler_policy"].upper())
        configured["scheduler_config"] = SchedulerConfig(capacity_scheduler_policy=policy)
    if sleeps:
        lost = {ExecutorMemoryType(tag): "NONE" for tag in (SLEEPING_WEIGHTS, SLEEPING_CACHE)}
        configured["sleep_config"] = SleepConfig(restore_modes=lost)  # others come back as they were
    return configured


def memory_tags(part: str | None = None) -> list[str]:
    """Return the names of an engine's memory: of ``kv_cache``, of ``weights``, which is all but that, or of all."""
    from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType

    tags = [member.value for member in ExecutorMemoryType if not member.value.startswith("_")]
    return [tag for tag in tags if part is None or (tag == SLEEPING_CACHE) == (part == SLEEPING_CACHE)]
