"""Weight buckets: everything once, in bounded pieces. Sharded models are in tests/unit/distributed/test_strategy.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from rlplug.weight_sync.buckets import weight_buckets

KIB = 1 << 10


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen2", "gpt2"])
@pytest.mark.parametrize("max_bytes", [1, 8 * KIB, 40 * KIB, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_once_in_bounded_buckets(family, max_bytes, dtype, model_folder, load_policy):
    policy = load_policy(model_folder(family))
    buckets = list(weight_buckets(policy, dtype, max_bytes))
    sent = [pair for bucket in buckets for pair in bucket]
    expected = policy.state_dict()
    if family != "llama":  # tied: the head is the embedding
        del expected["lm_head.weight"]
    assert [name for name, _ in sent] == list(expected)
    for name, tensor in sent:
        assert tensor.dtype == dtype
        assert not tensor.requires_grad
        assert torch.equal(tensor, expected[name].to(dtype)), name
    sizes = [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets]
    for bucket, size, following in zip(buckets, sizes, [*buckets[1:], None], strict=True):
        assert size <= max_bytes or len(bucket) == 1
        assert following is None or size + following[0][1].nbytes > max_bytes  # no bucket ends early


@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.nightly) for size in (3, 4))])
def test_shards_are_gathered_together(world_size):
    """One collective operation a bucket, whatever the rows; other ways of sharding are gathered one by one."""
    done = run_ranks([str(Path(__file__).with_name("gather_shards.py"))], world_size)
    assert done == [f"rank {rank} compared all\n" for rank in range(world_size)]
