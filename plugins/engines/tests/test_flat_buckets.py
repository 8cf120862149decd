"""A bucket as one buffer: what is cut out of it is what was put in."""

from __future__ import annotations

import pickle

import pytest
import torch
from rlplug_engines.flat_buckets import ALIGNMENT, flatten_bucket, tensors_of

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
    flat, places = flatten_bucket(bucket)
    places = pickle.loads(pickle.dumps(places))
    assert all(place.start % ALIGNMENT == 0 for place in places)
    for (name, tensor), (cut_name, cut) in zip(bucket, tensors_of(flat, places), strict=True):
        assert (cut_name, cut.shape, cut.dtype) == (name, tensor.shape, tensor.dtype)
        assert torch.equal(cut.reshape(-1).view(torch.uint8), tensor.detach().reshape(-1).view(torch.uint8))


def test_a_bucket_is_copied_and_its_tensors_are_not() -> None:
    tensor = torch.ones(4)
    flat, places = flatten_bucket([("a", tensor)])
    tensor.zero_()
    ((_, cut),) = tensors_of(flat, places)
    assert torch.equal(cut, torch.ones(4))
    cut.zero_()
    assert not flat[: places[0].end].any()
