"""Sizes that follow from the model, and who holds a GPU's memory when an engine does not start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from rlplug_engines.colocated import EngineOptions, EngineSizes, MemoryAdvice, MemoryBefore
from rlplug_engines.colocated.memory import start_failure

from rlplug.interfaces import EngineMemoryRequest, PolicySpec
from rlplug.types import GIB

SPEC = PolicySpec("model", torch.bfloat16, (2,), 2, max_context=8192)
NEEDS = EngineMemoryRequest(
    device_bytes=80 * GIB,
    parameters=2_000_000_000,
    kv_bytes_per_token=200_000,
    completions=128,
    longest=768,
    vocab_size=49152,
)


@dataclass(frozen=True)
class Options(EngineOptions):
    share_key: ClassVar[str] = "share"
    context_key: ClassVar[str] = "max_model_len"
    positive: ClassVar[tuple[str, ...]] = ()
    share: float = 0.5
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1


def sizes(policy: PolicySpec = SPEC, needs: EngineMemoryRequest = NEEDS, **options: object) -> EngineSizes:
    return EngineSizes.of(Options(**options), policy, needs)


def test_gpus_share_weights_and_cache() -> None:
    assert sizes() == EngineSizes(weights=4_000_000_000, kv_bytes_per_token=200_000)
    assert sizes(tensor_parallel_size=2) == EngineSizes(weights=2_000_000_000, kv_bytes_per_token=100_000)


def test_the_engines_own_dtypes_count() -> None:
    assert sizes(kv_cache_dtype="fp8_e4m3") == EngineSizes(weights=4_000_000_000, kv_bytes_per_token=100_000)
    float32 = replace(SPEC, dtype=torch.float32)
    assert sizes(float32).weights == 8_000_000_000
    assert sizes(float32, dtype="bfloat16") == EngineSizes(weights=4_000_000_000, kv_bytes_per_token=100_000)


def test_weights_in_fp8_take_a_byte_each() -> None:
    assert sizes(needs=replace(NEEDS, fp8_parameters=1_500_000_000)).weights == 2_500_000_000


def test_failed_start_says_who_holds_the_memory() -> None:
    memory = MemoryBefore(total=140 * GIB, free=40 * GIB, trainer=90 * GIB)
    advice = MemoryAdvice({"for rollout.share 0.5": 70 * GIB}, "Set rollout.share to 0.2.")
    assert str(start_failure("Engine", "no room", memory, advice)) == (
        "Engine did not start: no room\nOf the GPU's 140.0 GiB: 90.0 the trainer's tensors, 10.0 other programs and "
        "CUDA, 40.0 free, 70.0 for rollout.share 0.5. Set rollout.share to 0.2."
    )
