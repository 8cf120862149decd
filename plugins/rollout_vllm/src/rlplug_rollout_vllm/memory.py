"""GPU memory of vLLM: what it takes; and what to set when it does not start."""

from __future__ import annotations

from typing import Final

from rlplug.errors import RunError
from rlplug.interfaces import EngineMemory, EngineMemoryRequest, PolicySpec
from rlplug.rollout import engines
from rlplug.rollout.engines import EngineSizes, MemoryBefore
from rlplug.types import GIB
from rlplug_rollout_vllm.options import VLLMOptions

PASS_BYTES: Final = int(0.96 * GIB)
"""Activations of its passes and CUDA graphs: measured with vLLM 0.26, a policy of 1.7B and the options' defaults."""
ASLEEP_BYTES: Final = GIB // 2
"""What stays when it sleeps, measured in the same run."""


def planned_memory(options: VLLMOptions, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory:
    """Return what an engine takes of each of its GPUs; the KV cache is what ``gpu_memory_utilization`` leaves."""
    sizes = EngineSizes.of(options, policy, needs)
    least = options.longest(policy) * sizes.kv_bytes_per_token
    left = int(options.gpu_memory_utilization * needs.device_bytes) - sizes.weights - PASS_BYTES
    fixed = None if options.kv_cache_gib is None else int(options.kv_cache_gib * GIB)
    return EngineMemory(
        weights=sizes.weights,
        kv_cache=max(left, least) if fixed is None else fixed,  # with less than one sequence it does not start
        other=PASS_BYTES,
        asleep=ASLEEP_BYTES,
        kv_bytes_per_token=sizes.kv_bytes_per_token,
        least_kv_cache=least if fixed is None else None,
    )


def start_failure(problem: str, memory: MemoryBefore | None, share: float, weight_bytes: int, longest: int) -> RunError:
    """Say why vLLM did not start, and what to set.

    Args:
        problem: What it raised.
        memory: Of its GPU before; ``None`` on a CPU.
        share: ``gpu_memory_utilization``.
        weight_bytes: Of the model on this GPU.
        longest: ``max_model_len``, in tokens.
    """
    total, free = (memory.total, memory.free) if memory is not None else (0, 0)
    asked = share * total
    if asked > free:
        fits = int(100 * free / total) / 100
        remedy = f"Set rollout.gpu_memory_utilization to {fits:g} or less, or free memory with model.offload."
    elif weight_bytes > 0.9 * asked:
        remedy = "Raise rollout.gpu_memory_utilization, or share the model between GPUs with tensor_parallel_size."
    else:
        remedy = (
            f"The KV cache must hold one sequence of rollout.max_model_len {longest}: lower that to the longest prompt "
            "and completion of the run, raise gpu_memory_utilization, or lower max_num_batched_tokens."
        )
    claims = {f"asked for by rollout.gpu_memory_utilization {share:g}": asked, "of that for weights": weight_bytes}
    return engines.start_failure("vLLM", problem, memory, claims, remedy)
