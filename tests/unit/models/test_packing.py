"""Packed rows: what lies where, on one rank and on several that share the row."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlplug.models.attention.sequences import LONG
from rlplug.models.packing import STEP, pack
from rlplug.types import StepBatch

ROWS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6)


def rows_of(rows):
    """Return rows of (prompt, completion) tokens, with distinct ids; those of row r are 100 r + 1, 100 r + 2, ..."""
    lengths = np.array([sum(row) for row in rows])
    positions = np.concatenate([np.arange(length) for length in lengths])
    starts = np.repeat([prompt for prompt, _ in rows], lengths)
    count = len(rows)
    per_sequence = {"rewards": np.ones(count, np.float32), "reward_valid": np.ones(count, bool)}
    per_sequence |= {"group_index": np.arange(count), "truncated": np.zeros(count, bool)}
    per_token = {
        "input_ids": (np.repeat(np.arange(count), lengths) * 100 + positions + 1).astype(np.int32),
        "response_mask": positions >= np.maximum(starts, 1),
        "rollout_logprobs": np.zeros(len(positions), np.float32),
    }
    return StepBatch(lengths, per_sequence, per_token)


def parts_of(rows, size=1):
    return [pack(rows_of(rows), rank, size).packed for rank in range(size)]


@given(rows=ROWS, size=st.integers(1, 4))
def test_parts_of_all_ranks_are_the_rows_end_to_end(rows, size):
    parts = parts_of(rows, size)
    tokens = torch.cat([part.input_ids[0] for part in parts]).tolist()
    positions = torch.cat([part.position_ids[0] for part in parts]).tolist()
    real = rows_of(rows).per_token["input_ids"].tolist()
    assert tokens[: len(real)] == real
    assert len(tokens) % size == 0
    assert len(tokens) - len(real) < size
    assert not any(tokens[len(real) :])
    assert len({part.input_ids.shape for part in parts}) == 1
    for part in parts:
        borders = part.cu_seqlens.tolist()
        assert part.cu_seqlens.dtype == torch.int32
        lengths = [end - start for start, end in itertools.pairwise(borders)]
        filling = len(tokens) - len(real)
        assert lengths == [sum(row) for row in rows[:-1]] + [sum(rows[-1]) + filling]
        assert borders[-1] == len(tokens)
        assert part.max_length == max(lengths)
        assert positions == [position for row in rows for position in range(sum(row))] + [0] * filling


@given(rows=ROWS, size=st.integers(1, 4))
def test_each_trained_token_is_predicted_once_where_its_predecessor_is_read(rows, size):
    wanted = rows_of(rows).tokens.token_ids
    seen = torch.zeros(len(wanted))
    for part in parts_of(rows, size):
        assert len(part.predicting)
        assert part.num_trained == len(wanted)
        before = part.input_ids[0, part.predicting]
        kept = part.slots < len(wanted)
        assert torch.equal(wanted[part.slots[kept]], part.targets[kept])
        assert torch.equal(part.targets[kept] - before[kept], torch.ones_like(part.targets[kept]))
        seen[part.slots[kept]] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("size", [1, 2])
def test_rows_without_a_trained_token_still_predict_something(size):
    """Its gradient is 0: what the dummy predicts is no token of the loss."""
    for packed in parts_of([(3, 0), (1, 0)], size):
        assert len(packed.predicting) == 1
        dummy = torch.ones(1, requires_grad=True)
        values = packed.of_all_parts(dummy)
        assert len(values) == 0
        values.sum().backward()
        assert dummy.grad.tolist() == [0]


def test_one_long_sequence_is_filled_to_a_round_length():
    for size in (1, 2):
        part = parts_of([(LONG, 3)], size)[-1]
        assert part.input_ids.shape == (1, LONG // size + STEP)
        assert part.cu_seqlens.tolist() == [0, part.max_length] == [0, size * part.input_ids.shape[1]]
    assert parts_of([(LONG - 4, 3)])[0].input_ids.shape == (1, LONG - 1)
