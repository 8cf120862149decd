"""A profiled run: the files that it leaves, what they say, and that it trains as any other."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import SMALL, Job, Runs, run_job

from rlplug.observability.metrics_log import read_metrics
from rlplug.observability.phase_timer import PHASES

RUN = [
    *(*SMALL, "--model.num_steps", "4", "--checkpoint.every_n_steps", "3", "--run.token_samples_per_step", "0"),
]
PROFILED = [*RUN, "--profile.steps", "2-3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def results(folder: Path) -> Runs:
    """Run each command line once; the name is that of its folder below."""
    lines = {
        "plain": RUN,
        "profiled": PROFILED,
        "interrupted": [*RUN, "--profile.steps", "2-4"],
        "given-up": PROFILED,
        "late": [*RUN, "--profile.steps", "3-5"],
        "wrong": [*RUN, "--profile.steps", "3-2"],
        "nsys": [*PROFILED, "--profile.tool", "nsys"],
    }
    jobs = {name: Job([*line, "--run.dir", str(folder / name)]) for name, line in lines.items()}
    jobs["interrupted"].extra = {"signal": "SIGINT", "phase": "update", "step": 3}
    jobs["given-up"].extra = {"signal": "SIGINT", "phase": "rollout", "step": 2}
    go_on = ["fit", "--resume", str(folder / "profiled" / "001"), "--model.num_steps", "5"]
    jobs["resumed"] = Job(go_on, after="profiled")
    return Runs(jobs, folder)


def trace_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    with gzip.open(run_dir / "profile" / f"{name}.trace.json.gz", "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def ranges(events: list[dict[str, Any]]) -> Counter[str]:
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    return Counter(name.removeprefix("rlplug/") for name in names if name.startswith("rlplug/"))


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return read_metrics(run_dir / "metrics.jsonl")


def test_the_trace_has_the_phases_and_engine_calls_of_these_steps_alone(results, folder) -> None:
    assert results["profiled"].exit_code == 0, results["profiled"].output
    found = ranges(trace_of(folder / "profiled" / "001", "steps-2-3.rank-0"))
    engine = ("engine/update_weights", "engine/generate")
    assert found == dict.fromkeys([*PHASES, *engine], 2) | {"checkpoint": 1}


def test_the_summary_has_the_times_of_the_metrics(results, folder) -> None:
    results.ended("profiled")
    run_dir = folder / "profiled" / "001"
    summary = json.loads((run_dir / "profile" / "summary.json").read_text())
    rows = [row for row in metrics(run_dir) if row["step"] in (2, 3)]
    seconds = {row["name"]: row["seconds"] for row in summary["phases"]}

    assert (summary["steps"], summary["device"]) == ("2-3", None)
    assert len(rows) == 2
    assert {row["count"] for row in summary["phases"] if row["name"] in PHASES} == {2}
    for phase in ("rollout", "update"):
        logged = sum(float(row[f"time/{phase}"]) for row in rows)
        # the range lies within what the clock measures; how far depends on the machine
        assert 0.01 * logged < seconds[phase] < 1.01 * logged
    assert 0 < seconds["rollout/generate"] < seconds["rollout"]
    assert seconds["all"] == pytest.approx(sum(seconds[name] for name in (*PHASES, "checkpoint", "between phases")))


def test_the_summary_names_operators_and_the_absent_gpu(results, folder) -> None:
    results.ended("profiled")
    run_dir = folder / "profiled" / "001"
    costs = json.loads((run_dir / "profile" / "summary.json").read_text())["costs"]
    text = (run_dir / "profile" / "summary.txt").read_text()

    assert "aten::mm" in [cost["name"] for cost in costs["update"]]
    assert sum(cost["share"] for cost in costs["update"]) <= 1
    assert text.startswith("Profile of steps 2-3, rank 0, CPU.\nProfiling takes time")
    assert "There is no GPU here" in text
    assert "Costliest operators in update" in text
    assert sorted(path.name for path in (run_dir / "profile").iterdir()) == [
        *("steps-2-3.rank-0.trace.json.gz", "summary.json", "summary.txt"),
    ]


def test_the_run_says_where_the_profile_is(results, folder) -> None:
    message = results["profiled"].message
    assert f"profile of steps 2-3: {folder / 'profiled' / '001' / 'profile' / 'summary.txt'}" in message
    assert re.search(r"costliest operator: \w+::", message)  # beside load, a collective that waits
    assert "trace of steps 2-3, for https://ui.perfetto.dev: " in message


def test_profiling_changes_nothing_of_the_training(results, folder) -> None:
    for name in ("plain", "profiled"):
        results.ended(name)
    samples = [(folder / name / "001" / "samples.jsonl").read_text().splitlines() for name in ("plain", "profiled")]
    assert samples[0] == [line for line in samples[1] if json.loads(line)["step"] <= 4]
    losses = [[row["loss"] for row in metrics(folder / name / "001")][:4] for name in ("plain", "profiled")]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 4
    assert not (folder / "plain" / "001" / "tokens").exists()  # with run.token_samples_per_step: 0
    assert not any(json.loads(line)["has_tokens"] for line in samples[0])


def test_a_resumed_run_does_not_profile_again(results) -> None:
    assert results["resumed"].exit_code == 0, results["resumed"].output
    assert "profile.steps 2-3: the run resumes with step 5, so no step is profiled" in results["resumed"].message
    assert "profile of steps" not in results["resumed"].message


def test_ctrl_c_leaves_a_profile_of_the_steps_so_far(results, folder) -> None:
    run_dir = folder / "interrupted" / "001"
    assert results["interrupted"].exit_code == 130
    assert ranges(trace_of(run_dir, "steps-2-3.rank-0"))["update"] == 2


def test_ctrl_c_in_the_first_of_the_steps_leaves_none(results, folder) -> None:
    assert results["given-up"].exit_code == 130
    assert not (folder / "given-up" / "001" / "profile").exists()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("late", ["profile.steps is '3-5'", "the run's last step is 4", "model.num_steps"]),
        ("wrong", ["profile.steps is '3-2'", "such as 5 or 5-7"]),
        ("nsys", ["profile.tool is nsys", "this run is on cpu", "set profile.tool to torch"]),
    ],
)
def test_a_mistake_ends_in_one_message(results, name: str, parts: list[str]) -> None:
    assert results[name].exit_code == 2, results[name].output
    assert "Traceback" not in results[name].output
    for part in parts:
        assert part in results[name].message


@pytest.mark.nightly
def test_every_rank_leaves_a_trace_on_request(folder: Path) -> None:
    line = [*RUN, "--trainer.devices", "2", "--run.dir", str(folder / "two"), "--profile.ranks", "all"]
    result = run_job(Job([*line, "--profile.steps", "2"], num_ranks=2), folder / "two.log")

    assert result.exit_code == [0, 0], result.output
    for rank in (0, 1):
        assert ranges(trace_of(folder / "two" / "001", f"steps-2.rank-{rank}"))["update"] == 1
    assert json.loads((folder / "two" / "001" / "profile" / "summary.json").read_text())["rank"] == 0
