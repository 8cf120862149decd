"""What TensorRT-LLM takes of each of its GPUs, without the engine and without a GPU."""

from __future__ import annotations

from typing import Final

from rlplug_engines.colocated import EngineSizes

from rlplug.interfaces import EngineMemory, EngineMemoryRequest, PolicySpec
from rlplug.types import GIB
from rlplug_rollout_trtllm.options import TRTLLMOptions

PASS_BYTES: Final = int(4.0 * GIB)
"""Activations of its passes, CUDA graphs, communicators, and its worker's CUDA context: an estimate, not measured."""
ASLEEP_BYTES: Final = int(2.0 * GIB)
"""What stays when it sleeps, CUDA graphs among it: an estimate, not measured."""


def planned_memory(options: TRTLLMOptions, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory:
    """Return what an engine takes of each of its GPUs.

    ``free_gpu_memory_fraction`` is a share of what is free when weights and passes are there; here, as if all else of
    the GPU were. A share of the whole GPU, as the plan recommends for other engines, does not follow from it.

    Args:
        options: How the engine is built.
        policy: The policy.
        needs: Sizes of the run.
    """
    sizes = EngineSizes.of(options, policy, needs)
    free = max(0, needs.device_bytes - sizes.weights - PASS_BYTES)
    return EngineMemory(
        weights=sizes.weights,
        kv_cache=int(options.share * free),
        other=PASS_BYTES,
        asleep=ASLEEP_BYTES,
        kv_bytes_per_token=sizes.kv_bytes_per_token,
        share_key=options.written("free_gpu_memory_fraction"),
        share_has_passes=False,
    )
