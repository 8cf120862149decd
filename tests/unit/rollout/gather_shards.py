"""One rank of ``test_buckets.py``: shards a model in several ways, and compares what its buckets hold."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rlplug.rollout import buckets

BUCKET_BYTES = 64


def make_model() -> nn.Module:
    """Rows that no number of ranks divides, fewer rows than ranks, and a single number."""
    torch.manual_seed(0)
    model = nn.ParameterDict({f"rows {n}": nn.Parameter(torch.randn(n, 3)) for n in (1, 2, 5, 7, 8)})
    model["vector"] = nn.Parameter(torch.randn(5))
    model["cube"] = nn.Parameter(torch.randn(3, 2, 2))
    return model


def check(model: nn.Module, expected: nn.Module, num_gathers: int) -> None:
    gathers = []
    gather = dist.all_gather_into_tensor
    buckets.dist.all_gather_into_tensor = lambda *a, **k: (gathers.append(1), gather(*a, **k))
    sent = [pair for bucket in buckets.weight_buckets(model, torch.bfloat16, BUCKET_BYTES) for pair in bucket]
    buckets.dist.all_gather_into_tensor = gather
    assert [name for name, _ in sent] == [name for name, _ in expected.named_parameters()]
    for (name, tensor), parameter in zip(sent, expected.parameters(), strict=True):
        assert torch.equal(tensor, parameter.to(torch.bfloat16)), name
    assert len(gathers) == num_gathers, gathers


def main() -> None:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    fsdp = make_model()
    fully_shard(fsdp, mesh=dist.init_device_mesh("cpu", (size,)))
    num_buckets = sum(1 for _ in buckets.weight_buckets(make_model(), torch.bfloat16, BUCKET_BYTES))
    check(fsdp, make_model(), num_gathers=num_buckets)
    if size == 4:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        hybrid = make_model()
        fully_shard(hybrid, mesh=mesh)
        check(hybrid, make_model(), num_gathers=num_buckets)
        other = make_model()
        for name, parameter in list(other.items()):
            placements = [Shard(0), Shard(1) if parameter.dim() > 1 else Replicate()]
            sharded = distribute_tensor(parameter.detach(), mesh, placements)
            assert isinstance(sharded, DTensor)
            other[name] = nn.Parameter(sharded)
        check(other, make_model(), num_gathers=1)  # of the vector; the rest is left to torch
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    print("rank", os.environ["RANK"], "done", file=sys.stderr)
