"""What vLLM takes of each of its GPUs, on the trainer's or on its own, without vLLM and without a GPU."""

from __future__ import annotations

from typing import Final

from rlplug_engines.colocated import EngineSizes

from rlplug.interfaces import EngineMemory, EngineMemoryRequest, PolicySpec
from rlplug.types import GIB
from rlplug.weight_sync.manifest import policy_weights
from rlplug_rollout_vllm.options import VLLMOptions

PASS_BYTES: Final = int(0.96 * GIB)
"""Activations of its passes and CUDA graphs: measured with vLLM 0.26, a policy of 1.7B and the options' defaults."""
ASLEEP_BYTES: Final = GIB // 2
"""What stays when it sleeps, measured in the same run."""


def planned_memory(
    options: VLLMOptions, policy: PolicySpec, needs: EngineMemoryRequest, own_gpus: int = 0
) -> EngineMemory:
    """Return what an engine takes of each of its GPUs; the KV cache is what ``gpu_memory_utilization`` leaves.

    Args:
        options: How the engine is built.
        policy: The policy.
        needs: Sizes of the run.
        own_gpus: GPUs that all copies of the engine have besides the trainer's.
    """
    sizes = EngineSizes.of(options, policy, needs)
    least = options.longest(policy) * sizes.kv_bytes_per_token
    left = int(options.gpu_memory_utilization * needs.device_bytes) - sizes.weights - PASS_BYTES
    adapters = 0
    if policy.adapters is not None:
        adapters = sum(tensor.num_bytes for tensor in policy.adapters.tensors(policy_weights(policy)).values())
    fixed = None if options.kv_cache_gib is None else int(options.kv_cache_gib * GIB)
    return EngineMemory(
        weights=sizes.weights + 2 * adapters,  # as they came, and where kernels read them
        kv_cache=max(left, least) if fixed is None else fixed,  # with less than one sequence it does not start
        other=PASS_BYTES,
        asleep=ASLEEP_BYTES + adapters,
        kv_bytes_per_token=sizes.kv_bytes_per_token,
        least_kv_cache=least if fixed is None else None,
        own_gpus=own_gpus,
    )
