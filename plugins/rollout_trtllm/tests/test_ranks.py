"""Two ranks of a trainer, in processes of their own, that share one tensor-parallel engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trtllm_cases as cases
from ranks import run_ranks

TRAINER = Path(__file__).with_name("trtllm_trainer.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank said."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    cases.reference(folder)
    printed = run_ranks([str(TRAINER), str(folder)], 2, timeout=240, env={"CUDA_VISIBLE_DEVICES": "4,5"})
    return [json.loads(text.splitlines()[-1]) for text in printed]


def test_the_first_rank_has_the_engine_on_the_gpus_of_both(results: list[Any]) -> None:
    first, second = results
    assert first["calls"][0] == ["start", 2, [[0, 1]], "4,5"]
    assert second["calls"] == []


def test_a_bucket_has_the_handles_of_both_gpus(results: list[Any]) -> None:
    updates = [call for call in results[0]["calls"] if call[0] == "update_weights"]
    assert updates == [["update_weights", ["GPU-double-0", "GPU-double-1"]]]


def test_the_order_is_that_of_one_rank(results: list[Any]) -> None:
    assert [name for name, *_ in results[0]["calls"]] == [
        "start",
        "pause",
        "update_weights",
        "finish_update",
        "forget",
        "go_on",
        "forget",
        "release",
        "close",
    ]


def test_both_ranks_have_all_completions(results: list[Any]) -> None:
    assert [result["versions"] for result in results] == [[5, 5, 5]] * 2
    assert results[0]["bytes"] == results[1]["bytes"]
