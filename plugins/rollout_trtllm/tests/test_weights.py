"""Buckets on their way: a copy of their own, handles of the contract's form, and one payload for each GPU."""

from __future__ import annotations

import on_double
import pytest
import torch
from rlplug_rollout_trtllm.weights import Slot, flattened, merged, serialised, tensors_of

from rlplug.errors import RunError

GPU = on_double.CPUAsGPU(torch.device("cpu"))
BUCKET = [
    ("odd", torch.arange(7, dtype=torch.bfloat16)),
    ("transposed", torch.arange(12, dtype=torch.float32).view(3, 4).T),
    ("fp8", torch.ones(5, 3).to(torch.float8_e4m3fn)),
    ("scalar", torch.tensor(2.5)),
]


def test_a_bucket_comes_out_as_it_went_in() -> None:
    restored = dict(tensors_of(*flattened(BUCKET)))
    for name, tensor in BUCKET:
        assert (restored[name].dtype, restored[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(restored[name].float(), tensor.float())


def test_the_copy_is_its_own() -> None:
    original = torch.ones(4)
    flat, slots = flattened([("a", original)])
    original.zero_()
    assert torch.equal(dict(tensors_of(flat, slots))["a"], torch.ones(4))


def test_tensors_begin_where_any_dtype_can_be_read() -> None:
    _, slots = flattened(BUCKET)
    assert [slot.start % 256 for slot in slots] == [0] * len(BUCKET)
    assert slots[0] == Slot("odd", (7,), "bfloat16", 0, 14)


def test_the_payload_is_what_workers_read() -> None:
    from trtllm_double import wire

    flat, slots = flattened(BUCKET)
    items = wire.decode(serialised(tensors_of(flat, slots), GPU.reduce))
    assert [name for name, _ in items] == [name for name, _ in BUCKET]
    assert all(len(arguments) > 6 for _, (_, arguments) in items)


def test_payloads_of_several_gpus_become_one() -> None:
    assert merged([{"GPU-0": "a"}, {"GPU-1": "b"}]) == {"GPU-0": "a", "GPU-1": "b"}


def test_two_ranks_on_one_gpu_are_refused() -> None:
    with pytest.raises(RunError, match="the same GPU, GPU-0"):
        merged([{"GPU-0": "a"}, {"GPU-0": "b"}])
