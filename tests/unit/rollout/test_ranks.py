"""Ranks that share an engine: four processes in two pairs, and a rank alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from rlplug_engines.colocated.colocated import require_neighbours

from rlplug.interfaces import Placement
from rlplug.rollout.ranks import EngineRanks

TRAINER = Path(__file__).with_name("engine_ranks_trainer.py")


@pytest.fixture(scope="module")
def results() -> list[Any]:
    """What each rank said."""
    return [json.loads(printed) for printed in run_ranks([str(TRAINER)], 4, timeout=240)]


def test_the_first_of_each_pair_makes_it_for_both(results: list[Any]) -> None:
    assert [result[0] for result in results] == [True, False, True, False]
    assert [result[1] for result in results] == ["made by 0", "made by 0", "made by 2", "made by 2"]
    assert [result[2] for result in results] == [[0], [], [2], []]


def test_handles_are_gathered_at_the_first_in_order(results: list[Any]) -> None:
    assert [result[3] for result in results] == [
        ["handle of 0", "handle of 1"],
        [],
        ["handle of 2", "handle of 3"],
        [],
    ]


def test_what_the_first_raises_both_raise(results: list[Any]) -> None:
    assert [result[4] for result in results] == ["fault: it died, True"] * 2 + ["refusal: refused by 2"] * 2


def test_gpus_that_are_no_neighbours_are_refused(results: list[Any]) -> None:
    for first, result in zip((0, 0, 2, 2), results, strict=True):
        assert f"ranks {first} to {first + 1} run on " in result[5]
        assert "neighbouring GPUs" in result[5]


def test_ranks_know_their_engine(results: list[Any]) -> None:
    assert [result[6] for result in results] == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_ranks_that_exchange_nothing_need_no_group() -> None:
    ranks = EngineRanks(Placement(torch.device("cpu"), 5, 6), size=3, communicates=False)
    assert (ranks.engine, ranks.index, ranks.num_engines, ranks.size) == (1, 2, 2, 3)


def test_a_rank_alone_needs_no_group() -> None:
    ranks = EngineRanks(Placement(torch.device("cpu"), 3, 4), size=1, deadline_s=1)
    assert ranks.is_first
    assert ranks.from_first(lambda: 5) == 5
    assert ranks.gathered(b"handle") == [b"handle"]
    require_neighbours(ranks, "SGLang", 7)
