"""Runs with environments from the command line: a game is learned, and trouble costs what it must and no more."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from command_line import Job, run_jobs

GAME = ["fit", "--config", "configs/hidden_digit.yaml"]
SMALL = [
    *(*GAME, "--model.num_steps", "3", "--model.batch.prompts_per_step", "4", "--model.batch.group_size", "8"),
    *("--run.report", "false"),
]
JOBS = {
    "learned": Job([*GAME, "--model.num_steps", "80"]),
    "undisturbed": Job(SMALL),
    "troubled": Job(
        [
            *(*SMALL, "--model.environment", "parts.TroubledDigit", "--model.turns.step_deadline_s", "2"),
            *("--model.limits.max_reward_error_share", "0.9"),
        ]
    ),
    "too troubled": Job([*SMALL, "--model.environment", "parts.TroubledDigit", "--model.turns.step_deadline_s", "2"]),
    "engine dies": Job([*SMALL, "--model.rollout", "parts.DiesOnce"]),
    "no environment": Job([*SMALL, "--model.environment", "null"]),
    "turns alone": Job(
        [*("fit", "--config", "configs/quickstart.yaml", "--model.num_steps", "1", "--model.turns.max_turns", "3")]
    ),
    "uncorrected": Job([*SMALL, "--model.partial_rollout.max_tokens_per_step", "3"]),
    "no streaming": Job(
        [*SMALL, "--model.partial_rollout.max_seconds_per_step", "3", "--model.algorithm.correction", "{}"]
    ),
    "typo": Job([*SMALL, "--model.environment", "ToolEnvironmant"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the results of all jobs, and the folder with their run folders."""
    folder = tmp_path_factory.mktemp("environments")
    for name, job in JOBS.items():
        job.arguments += ["--run.dir", str(folder / name)]
    return run_jobs(JOBS, folder), folder


def metrics(folder: Path) -> list[dict[str, float]]:
    with (folder / "001" / "metrics.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def test_the_game_is_learned_from_scratch(runs):
    """Guesses at random earn -0.07 with four turns; whoever halves what is left earns 0.81 in 2.9 turns."""
    results, folder = runs
    assert results["learned"].exit_code == 0, results["learned"].output[-3000:]
    rows = metrics(folder / "learned")
    assert sum(row["reward/mean"] for row in rows[:3]) / 3 < 0.1
    assert sum(row["reward/mean"] for row in rows[-5:]) / 5 > 0.4
    assert rows[-1]["turns/mean"] < rows[0]["turns/mean"]
    assert all(row["mismatch/max"] < 1e-3 for row in rows)
    report = (folder / "learned" / "001" / "report.html").read_text()
    assert "turns/mean" in report


def test_trouble_costs_its_own_trajectories(runs):
    """96 trajectories; 1 in 10 calls fails, so about a quarter of them, and all others are as they were."""
    results, folder = runs
    assert results["troubled"].exit_code == 0, results["troubled"].output[-3000:]
    rows = metrics(folder / "troubled")
    failures = [row["environment/failures"] for row in rows]
    assert all(4 <= each <= 16 for each in failures)
    assert [row["reward/error_share"] * 32 for row in rows] == pytest.approx(failures)
    assert max(row["environment/abandoned_threads"] for row in rows) == 1  # the one that hangs
    first, undisturbed = rows[0], metrics(folder / "undisturbed")[0]
    assert first["completion/num_tokens"] < undisturbed["completion/num_tokens"]
    assert first["filter/missing_groups"] == 0


def test_too_much_trouble_stops_the_run(runs):
    result = runs[0]["too troubled"]
    assert result.exit_code == 1
    assert "reward 'environment'" in result.message
    assert "the game server is gone" in result.message
    assert "Correct model.environment or its data" in result.message


def test_an_engine_that_dies_between_turns_changes_nothing(runs):
    results, folder = runs
    assert results["engine dies"].exit_code == 0, results["engine dies"].output[-3000:]
    rows, undisturbed = metrics(folder / "engine dies"), metrics(folder / "undisturbed")
    assert rows[0]["rollout/restarts"] == 1
    for name in ("reward/mean", "turns/mean", "completion/num_tokens"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in undisturbed])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no environment", "model.rewards is empty: name at least one reward, or a model.environment that rewards"),
        ("turns alone", "model.turns is set, and model.environment is not"),
        ("uncorrected", "GRPO does not correct for that: set its init_args.correction"),
        ("no streaming", "model.partial_rollout.max_seconds_per_step needs an engine with 'streaming'"),
        ("typo", "did you mean 'ToolEnvironment'"),
    ],
)
def test_mistakes_are_named(runs, name, words):
    result = runs[0][name]
    assert result.exit_code == 2
    assert words.lower() in result.message.lower(), result.message[-800:]
