"""What SGLang takes of each of its GPUs, on the trainer's or on its own, without SGLang and without a GPU."""

from __future__ import annotations

from typing import Final

from rlplug_engines.colocated import EngineSizes

from rlplug.interfaces import EngineMemory, EngineMemoryRequest, PolicySpec
from rlplug.types import GIB
from rlplug_rollout_sglang.options import SGLangOptions

PASS_BYTES: Final = int(2.0 * GIB)
"""Activations of its passes, CUDA graphs, and its processes' CUDA contexts: an estimate, not measured."""
ASLEEP_BYTES: Final = int(1.5 * GIB)
"""What stays when it sleeps, CUDA graphs among it: an estimate, not measured."""
KV_MARGIN: Final = 256
"""Tokens of the KV cache beyond the longest sequence: SGLang counts whole pages, and keeps one of them free."""


def planned_memory(
    options: SGLangOptions, policy: PolicySpec, needs: EngineMemoryRequest, own_gpus: int = 0
) -> EngineMemory:
    """Return what an engine takes of each of its GPUs, at most.

    ``mem_fraction_static`` is a share of what is free when it starts; here, as if all of the GPU were.

    Args:
        options: How the engine is built.
        policy: The policy.
        needs: Sizes of the run.
        own_gpus: GPUs that all copies of the engine have besides the trainer's.
    """
    sizes = EngineSizes.of(options, policy, needs)
    least = (options.longest(policy) + KV_MARGIN) * sizes.kv_bytes_per_token
    kv_cache = max(int(options.share * needs.device_bytes) - sizes.weights, least)
    if options.max_total_tokens is not None:
        kv_cache = min(kv_cache, options.max_total_tokens * sizes.kv_bytes_per_token)
    return EngineMemory(
        weights=sizes.weights,
        kv_cache=kv_cache,
        other=PASS_BYTES,
        asleep=ASLEEP_BYTES,
        kv_bytes_per_token=sizes.kv_bytes_per_token,
        least_kv_cache=least,
        share_key=options.written("mem_fraction_static"),
        share_has_passes=False,
        own_gpus=own_gpus,
    )
