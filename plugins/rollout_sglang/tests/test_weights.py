"""A bucket as one tensor: what SGLang cuts out of it is what was put in."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from rlplug_engines.flat_buckets import flatten_bucket
from rlplug_rollout_sglang.weights import serialised

from rlplug.interfaces import Bucket


@pytest.fixture
def bucket() -> Bucket:
    """Tensors of several dtypes, of odd sizes, one without dimensions and one that is a transposed view."""
    return [
        ("odd", torch.randn(3, 5).to(torch.bfloat16)),
        ("scale", torch.tensor(0.5)),
        ("transposed", torch.randn(4, 6).T),
        ("fp8", torch.randn(7).to(torch.float8_e4m3fn)),
        ("parameter", torch.nn.Parameter(torch.randn(2, 2, dtype=torch.float64))),
    ]


def test_tensors_are_cut_out_as_they_were(bucket: Bucket) -> None:
    """As SGLang's ``FlattenedTensorBucket.reconstruct_tensors`` does it."""
    received = pickle.load(io.BytesIO(serialised(*flatten_bucket(bucket))))
    flat = received["flattened_tensor"]
    for entry, (name, tensor) in zip(received["metadata"], bucket, strict=True):
        cut = flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape)
        assert entry.name == name
        assert entry.numel == entry.end_idx - entry.start_idx == tensor.nbytes
        assert torch.equal(cut.view(-1).view(torch.uint8), tensor.detach().contiguous().view(-1).view(torch.uint8))


def test_a_handle_is_no_copy(bucket: Bucket) -> None:
    """On a CPU the tensor is in shared memory; what arrives is the same memory."""
    flat, places = flatten_bucket(bucket)
    received = pickle.load(io.BytesIO(serialised(flat, places)))
    assert [entry.name for entry in received["metadata"]] == [name for name, _ in bucket]
    flat[0] = 1
    assert received["flattened_tensor"][0] == 1
    flat[0] = 2
    assert received["flattened_tensor"][0] == 2
