"""One engine and all that is asked of it: in the trainer's process, or as an actor of Ray near the engine's workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rlplug_rollout_trtllm.environment import engine_environment, require_tensorrt_llm
from rlplug_rollout_trtllm.placement import Bundles
from rlplug_rollout_trtllm.sampling import Output
from rlplug_rollout_trtllm.surface import SLEEPING_CACHE, SLEEPING_WEIGHTS

ABORT_INTERVAL_S: Final = 0.2

UNKNOWN_ARGUMENT: Final = (
    "If it does not know an argument: python -m rlplug_rollout_trtllm.smoke --surface-only says what differs."
)
"""Advice about an engine that did not start."""


class EngineHost:
    """Holds TensorRT-LLM's ``AsyncLLM``. Every method runs in one event loop, and takes and returns plain data."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._results: dict[str, Any] = {}

    async def start(
        self, arguments: Mapping[str, Any], bundles: Bundles, sleeps: bool, devices: str | None = None
    ) -> str:
        """Build the engine, and return its version.

        Args:
            arguments: :meth:`rlplug_rollout_trtllm.options.TRTLLMOptions.arguments`.
            bundles: A worker runs in each.
            sleeps: Whether memory can be given back.
            devices: For ``CUDA_VISIBLE_DEVICES`` of the workers; ``None`` leaves it.
        """
        with engine_environment(devices):
            version = require_tensorrt_llm()
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
        """Return what is generated for one request.

        Args:
            name: For :meth:`abort`; no two requests have the same.
            sampling: :func:`rlplug_rollout_trtllm.sampling.sampling_arguments`.
        """
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

    # ---- weights and memory ---------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Take no request until :meth:`go_on`; requests that run would be stopped."""
        await self._engine.pause_generation()

    async def go_on(self) -> None:
        """Take requests again."""
        await self._engine.resume_generation()

    async def update_weights(self, payload: Mapping[str, str]) -> None:
        """Load a bucket, of which each of the engine's GPUs has handles in ``payload``, by UUID."""
        await self._engine.update_weights(dict(payload))

    async def finish_update(self) -> None:
        """Put new weights into the form that kernels read, when all have come."""
        await self._engine.update_weights(None)

    async def forget(self) -> None:
        """Empty the cache of prompts: it holds what the former weights computed."""
        await self._engine.collective_rpc("reset_prefix_cache")

    async def release(self) -> None:
        """Give all memory back."""
        await self._engine.release(_memory_types())

    async def resume(self, part: str) -> None:
        """Take memory again: for ``kv_cache``, or for ``weights``, which is all but that."""
        is_cache = part == SLEEPING_CACHE
        await self._engine.resume([tag for tag in _memory_types() if (tag == SLEEPING_CACHE) == is_cache])

    async def call_workers(self, worker: int | None, method: str, *arguments: Any) -> list[Any]:
        """Call a method of one worker, by its rank, or of all, and return what they return."""
        return list(await self._engine.collective_rpc(method, args=arguments, unique_reply_rank=worker))

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

    configured = dict(arguments)
    configured["kv_cache_config"] = KvCacheConfig(**arguments["kv_cache_config"])
    graphs = arguments["cuda_graph_config"]
    configured["cuda_graph_config"] = None if graphs is None else CudaGraphConfig(**graphs)
    if scheduler := arguments.get("scheduler_config"):
        policy = getattr(CapacitySchedulerPolicy, scheduler["capacity_scheduler_policy"].upper())
        configured["scheduler_config"] = SchedulerConfig(capacity_scheduler_policy=policy)
    if sleeps:
        lost = {ExecutorMemoryType(tag): "NONE" for tag in (SLEEPING_WEIGHTS, SLEEPING_CACHE)}
        configured["sleep_config"] = SleepConfig(restore_modes=lost)  # others come back as they were
    return configured


def _memory_types() -> list[str]:
    from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType

    return [member.value for member in ExecutorMemoryType if not member.value.startswith("_")]
