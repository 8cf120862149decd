"""Packed rows: what lies where, on one rank and on several that share the row."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlplug.models.packing import LONG, STEP, pack

ROWS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6)


def masks(rows):
    """Return distinct ids, attention and response mask, [B, T], of rows of (prompt, completion) tokens."""
    longest = max(sum(row) for row in rows)
    steps = torch.arange(longest)
    prompt, total = torch.tensor([row[0] for row in rows]), torch.tensor([sum(row) for row in rows])
    attention = steps < total[:, None]
    ids = torch.arange(len(rows))[:, None] * 100 + steps + 1
    return ids.masked_fill(~attention, 0), attention, attention & (steps >= prompt[:, None])


@given(rows=ROWS, size=st.integers(1, 4))
def test_parts_of_all_ranks_are_the_rows_end_to_end(rows, size):
    ids, attention, response = masks(rows)
    parts = [pack(ids, attention, response, rank, size) for rank in range(size)]
    tokens = torch.cat([part.input_ids[0] for part in parts]).tolist()
    positions = torch.cat([part.position_ids[0] for part in parts]).tolist()
    real = [token for row in ids.tolist() for token in row if token]
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
    ids, attention, response = masks(rows)
    wanted = response.clone()
    wanted[:, 0] = False
    seen = torch.zeros(ids.shape)
    for rank in range(size):
        part = pack(ids, attention, response, rank, size)
        assert len(part.predicting)
        before = part.input_ids[0, part.predicting]
        kept = part.slots < ids.numel()
        assert torch.equal(ids.flatten()[part.slots[kept]], part.targets[kept])
        assert torch.equal(part.targets[kept] - before[kept], torch.ones_like(part.targets[kept]))
        seen += part.unpack(torch.ones(len(part.slots)))
    assert torch.equal(seen, wanted.float())


def test_unpacked_values_keep_their_gradient_and_leave_the_rest_zero():
    ids, attention, response = masks([(2, 2), (1, 3)])
    packed = pack(ids, attention, response)
    values = torch.tensor([10.0, 20.0, 30.0, 40.0, 50.0], requires_grad=True)
    grid = packed.unpack(values)
    assert grid.tolist() == [[0, 0, 10, 20], [0, 30, 40, 50]]
    (grid * torch.arange(8.0).view(2, 4)).sum().backward()
    assert values.grad.tolist() == [2, 3, 5, 6, 7]


@pytest.mark.parametrize("size", [1, 2])
def test_rows_without_a_trained_token_still_predict_something(size):
    ids, attention, response = masks([(3, 0), (1, 0)])
    for rank in range(size):
        packed = pack(ids, attention, response, rank, size)
        assert len(packed.predicting) == 1
        assert not packed.unpack(torch.ones(1)).any()


def test_one_long_sequence_is_filled_to_a_round_length():
    ids, attention, response = masks([(LONG, 3)])
    for size in (1, 2):
        part = pack(ids, attention, response, size - 1, size)
        assert part.input_ids.shape == (1, LONG // size + STEP)
        assert part.cu_seqlens.tolist() == [0, part.max_length] == [0, size * part.input_ids.shape[1]]
    ids, attention, response = masks([(LONG - 4, 3)])
    assert pack(ids, attention, response).input_ids.shape == (1, LONG - 1)
