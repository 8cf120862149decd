"""``benchmarks/step.py``: the bare parts that it starts, what it makes of their lines, and the table."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from forked import run_forked

from rlplug.interfaces import PolicySpec
from rlplug.rollout.trajectory import Trajectory, new_trajectories
from rlplug.types import Completion, Prompt

pytestmark = pytest.mark.nightly  # of a benchmark

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ELSEWHERE = {"step_trl", "streaming_servers", "update_trl"}
"""Need TRL, which no environment of this project has, and the files of a new plugin."""
CEILINGS = {"matmul": 1e12, "copy": 1e12, "gpus": 1}


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("step")


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("rollout")


@pytest.mark.parametrize(
    "name", ["fixed", "heavy-tailed", "large-vocabulary", "long", "thousand", "8b", "8b-lora", "tiny"]
)
def test_rollout_takes_the_arguments_of_each_workload(
    step: ModuleType, rollout: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    workload = step.WORKLOADS[name]
    monkeypatch.setattr(sys, "argv", ["rollout.py", *step.rollout_arguments(workload)])

    arguments = rollout.parse()
    requests = rollout.make_requests(arguments, vocab_size=100)

    assert [request.max_new_tokens for request in requests] == workload.lengths()


def test_a_trajectory_keeps_its_length_over_its_requests(step: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """It catches a resumed request that gets a length of its own, so that partial rollouts do other work."""
    monkeypatch.setattr(PolicySpec, "__init__", PolicySpec.__init__)
    monkeypatch.setattr(Trajectory, "request", Trajectory.request)
    importlib.import_module("step_work").end_trajectories_at(iter([5, 9, 2]))
    first, second, third = new_trajectories([Prompt("a", (1, 2), "")], [0], 3, "key")

    assert [each.request(None).max_new_tokens for each in (first, second)] == [5, 9]
    first.add_completion(Completion(first.request_id, [3, 4], [-1.0, -1.0], "abort", 0), ends_turn=False)
    assert [each.request(12).max_new_tokens for each in (first, second, third)] == [3, 9, 2]


def test_kinds_of_lengths_follow_each_other(step: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """It catches ranks whose work differs where it should not, and one that changes its lengths earlier than others."""
    work = importlib.import_module("step_work")
    ranks = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: 1, get_world_size=lambda: 2)
    monkeypatch.setattr(work, "dist", ranks)
    monkeypatch.setenv("STEP_LENGTHS", "alike:2 drawn:1")
    workload = step.WORKLOADS["tiny"]

    found = list(itertools.islice(work.lengths_of_this_rank(workload), 32))

    alike, drawn = dataclasses.replace(workload, num_completions=8).lengths(), workload.lengths()[8:]
    assert found == [*alike, *alike, *drawn, *drawn]


def test_a_longest_completion_that_is_the_mean_is_refused(
    rollout: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rollout.py", "--phases", "bare", "--new", "512", "--longest", "512"])
    with pytest.raises(SystemExit):
        rollout.parse()
    assert "--longest 512 must be above --new 512, the mean" in capsys.readouterr().err


def test_the_bare_rollout_is_read_from_what_rollout_prints(
    step: ModuleType, rollout: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    record = rollout.Record("vllm", "plugin", None, is_first=True)
    record.say("generate", seconds=[1.0, 1.5])  # the plugin's, not the bare engine's
    dataclasses.replace(record, phase="bare").say("start", seconds=20.0)
    dataclasses.replace(record, phase="bare").say("generate", seconds=[3.5, 3.25, 4.0])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert step.parts_of([{"update s": 2.25}], printed) == {"update": 2.25, "rollout": 3.25}
    assert step.parts_of([{"variant": "x", "error": "out of memory"}], printed) == {"rollout": 3.25}
    assert step.parts_of([], printed[:2]) == {}


def test_the_table_shows_both_bare_parts_and_no_sum_of_one(step: ModuleType) -> None:
    workload = step.WORKLOADS["tiny"]

    both = step.markdown(workload, {}, {"update": 2.0, "rollout": 3.5}, CEILINGS).splitlines()
    assert [cell.strip() for cell in both[0].split("|")][1:-1] == ["", "bare parts", "floor"]
    column = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in both[2:]}
    assert column == {"update": "2.00", "rollout": "3.50", "**step, s**": "5.50"}

    one = step.markdown(workload, {}, {"update": 2.0}, CEILINGS).splitlines()
    column = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in one[2:]}
    assert column == {"update": "2.00", "rollout": "", "**step, s**": ""}


def test_each_script_finds_what_it_imports() -> None:
    names = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - ELSEWHERE)
    imports = "\n".join(f"import {name}" for name in names)
    run_forked([sys.executable, "-c", imports], cwd=BENCHMARKS, timeout=300, check=True)


def test_the_update_is_timed_and_its_gradients_are_compared() -> None:
    command = [sys.executable, BENCHMARKS / "update.py", "--shape", "tiny", "--rows", "4", "--prompt", "6"]
    command += ["--completion", "10", "--heavy-tail", "--longest", "40", "--variants", "plain", "fused"]
    command += ["--phases", "update", "logprobs", "gradients", "--dtype", "float32", "--warm-up", "0", "--repeats", "1"]
    done = run_forked(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300, check=True)
    plain, fused = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"'))
    assert (plain["variant"], plain["tokens"], plain["gradients differ by"]) == ("plain", 4 * 16, 0)
    assert min(row[f"{name} s"] for row in (plain, fused) for name in ("update", "logprobs")) > 0
    assert fused["gradients differ by"] < 1e-5
    assert fused["loss differs by"] < 1e-5
