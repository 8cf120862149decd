"""The state of the random generators survives a checkpoint file."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from rlplug.distributed.rng import rng_state, set_rng_state


@pytest.fixture(autouse=True)
def _same_state_after():
    state = rng_state()
    yield
    set_rng_state(state)


def draw():
    return [
        random.random(),
        random.gauss(0, 1),
        *numpy.random.random(3).tolist(),
        numpy.random.standard_normal(),  # draws a pair and keeps one for the next call
        *torch.randn(3).tolist(),
    ]


@pytest.mark.parametrize("num_drawn_before", [0, 1, 7])
def test_round_trip_through_a_file(tmp_path, num_drawn_before):
    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    for _ in range(num_drawn_before):
        draw()
    torch.save(rng_state(), tmp_path / "state.pt")
    expected = [draw() for _ in range(3)]
    random.seed(9), numpy.random.seed(9), torch.manual_seed(9)
    assert draw() != expected[0]
    set_rng_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [draw() for _ in range(3)] == expected


def test_the_state_is_a_copy():
    state = rng_state()
    expected = draw()
    set_rng_state(state)
    assert draw() == expected
    set_rng_state(state)
    assert draw() == expected
