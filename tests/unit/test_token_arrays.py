"""Arrays of tokens: what becomes one, that nothing can be written through it, and when records are equal."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch

from rlplug.token_arrays import as_tokens
from rlplug.types import Completion, Prompt, Sample

COMPLETION = Completion("a", (3, 4), (-0.5, math.nan), "stop", 1)


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ((3, 4), np.int32, [3, 4]),
        ([], np.int32, []),
        (np.array([3, 4], np.uint64), np.int32, [3, 4]),
        (np.arange(6)[::2], np.int32, [0, 2, 4]),
        ([True, False], np.bool_, [True, False]),
        ([-1, -0.5], np.float32, [-1.0, -0.5]),
        ([-1e300], np.float32, [-math.inf]),  # which the check of logprobs refuses
    ],
)
def test_numbers_become_arrays(values, dtype, expected):
    array = as_tokens(values, dtype)
    assert (array.dtype, array.tolist(), array.flags.writeable) == (dtype, expected, False)
    assert as_tokens(array, dtype) is array


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1.0], np.int32),
        ([True], np.int32),
        ([1 << 31], np.int32),
        ([-(1 << 31) - 1], np.int32),
        ([1 << 80], np.int32),
        (["1"], np.int32),
        ([None], np.float32),
        ([[1], [2, 3]], np.int32),
        ([[1, 2]], np.int32),
        (None, np.int32),
        (1, np.int32),
        ([0, 1], np.bool_),
    ],
)
def test_other_values_are_refused_and_never_converted(values, dtype):
    with pytest.raises(ValueError, match=r"not 1 |not one list|beyond int32"):
        as_tokens(values, dtype)


def test_a_writable_array_is_copied_and_a_record_has_none():
    for theirs in (np.array([3, 4], np.int32), torch.tensor([3, 4], dtype=torch.int32)):
        record = dataclasses.replace(COMPLETION, token_ids=theirs)
        theirs[0] = 5  # an engine that fills its buffer again
        assert record.token_ids.tolist() == [3, 4]
    for each in (record, pickle.loads(pickle.dumps(record)), copy.deepcopy(record)):
        with pytest.raises(ValueError, match="read-only"):
            each.token_ids[0] = 1


def test_records_are_equal_by_their_arrays():
    assert pickle.loads(pickle.dumps(COMPLETION)) == COMPLETION
    for change in ({"token_ids": (3, 5)}, {"token_ids": (3,)}, {"logprobs": (-0.5, -0.5)}, {"finish_reason": "length"}):
        assert dataclasses.replace(COMPLETION, **change) != COMPLETION
    assert COMPLETION != "a"


def test_an_engines_odd_values_are_kept_for_the_check_that_names_them():
    assert Completion("a", ["x"], [None], "stop", 1).token_ids == ["x"]


def test_a_sample_names_the_field_that_is_no_array():
    with pytest.raises(ValueError, match=r"Sample\.response_mask has 1 dimensions of int64"):
        Sample(Prompt("p", (1,), ""), 0, (1, 2), (0, 1), (0.0, -1.0), "", "stop", 0)
