"""Runs whose memory runs out, as far as they can tell: in each phase and on any rank, one message and no traceback."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import SMALL, Job, Result, Runs

RUN = [*SMALL, "--model.num_steps", "2"]
FOLDER = "out_of_memory"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("lack")
    scores = '[{"class_path": "tests.integration.parts.LacksMemoryToScore"}]'
    lines = {
        "update": [
            *RUN,
            "--model.algorithm",
            "tests.integration.parts.LacksMemoryOnLastRank",
            "--trainer.devices",
            "2",
        ],
        "logprobs": [*RUN, "--model.optimizations", scores],
        "rollout": [*RUN, "--model.rollout", "tests.integration.parts.LacksMemoryToGenerate"],
    }
    lines["unplanned"] = ["--block", "plan", *lines["logprobs"]]
    jobs = {name: Job([*line, "--run.dir", str(folder / name)]) for name, line in lines.items()}
    jobs["update"].num_ranks = 2
    return Runs(jobs, folder)


def traceback_of(result: Result, run_dir: Path, name: str) -> str:
    """Return the text of the file that a message names, after a check that the terminal has the message alone."""
    file = run_dir / FOLDER / name
    assert f"Traceback: {file}" in result.message
    assert "Traceback (most recent call last)" not in result.output
    assert "raised" not in result.output
    return file.read_text()


def test_a_rank_says_what_it_lacked_and_the_other_ends_too(runs: Runs) -> None:
    """Catches a rank that waits for the one that failed, and a message that rank 0 alone can write."""
    rank_0, run_dir = runs.ended("update", [1, 1]), runs.folder / "update" / "001"
    rank_1 = Result(1, Path(f"{runs.folder / 'update.log'}.1").read_text())
    text = traceback_of(rank_1, run_dir, "step-00000001-rank-1.txt")

    assert "rlplug: out of memory, allocated in parts.py:" in rank_1.message
    assert (
        "(loss), in a call of LacksMemoryOnLastRank.loss in tests/integration/parts.py: CUDA out of" in rank_1.message
    )
    assert "Tried to allocate 2.00 GiB. phase update of step 1, rank 1 of 2, cpu; in GiB:" in rank_1.message
    assert "First set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: 6.5 GiB" in rank_1.message
    assert (
        text.index("phase update of step 1") < text.index("Traceback (most recent call last)") < text.index("in loss")
    )
    assert len(re.findall(r"rank 1, process \d+, has ended, and this one with it", rank_0.output)) == 1
    assert [file.name for file in (run_dir / FOLDER).iterdir()] == ["step-00000001-rank-1.txt"]


def test_libraries_without_memory_are_known_by_their_messages(runs: Runs) -> None:
    result, run_dir = runs.ended("logprobs", 1), runs.folder / "logprobs" / "001"
    assert "refuse" in traceback_of(result, run_dir, "step-00000001-rank-0.txt")
    assert "phase logprobs of step 1, rank 0 of 1, cpu" in result.message
    assert "CUBLAS_STATUS_ALLOC_FAILED" in result.message
    assert json.loads((run_dir / "run.json").read_text())["status"] == "failed"


def test_an_error_that_an_engine_makes_of_it_has_the_message_too(runs: Runs) -> None:
    result, run_dir = runs.ended("rollout", 1), runs.folder / "rollout" / "001"
    assert "OutOfMemoryError: CUDA out of" in traceback_of(result, run_dir, "step-00000001-rank-0.txt")
    assert "rlplug: the engine failed: OutOfMemoryError phase rollout of step 1, rank 0 of 1" in result.message


def test_without_a_planner_one_line_names_the_place(runs: Runs) -> None:
    result = runs.ended("unplanned", 1)
    lines = [line for line in result.output.splitlines() if "CUBLAS" in line or "raised" in line or "Traceback" in line]
    assert len(lines) == 1
    assert lines[0].startswith("rlplug: out of memory, allocated in parts.py:")
    assert not (runs.folder / "unplanned" / "001" / FOLDER).exists()
