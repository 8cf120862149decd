"""Runs with environments from the command line: a game is learned, and trouble costs what it must and no more."""

from __future__ import annotations

import pytest
from command_line import Job, Runs

from rlplug.observability.metrics_log import read_metrics

GAME = ["fit", "--config", "configs/hidden_digit.yaml"]
SMALL = [
    *(*GAME, "--model.num_steps", "3", "--model.batch.prompts_per_step", "4", "--model.batch.group_size", "8"),
    *("--run.report", "false"),
]
LINES = {
    "learned": [*GAME, "--model.num_steps", "80"],
    "undisturbed": SMALL,
    "troubled": [
        *(*SMALL, "--model.environment", "parts.TroubledDigit", "--model.turns.step_deadline_s", "2"),
        *("--model.limits.max_reward_error_share", "0.9", "--model.validation.every_n_steps", "2"),
        *("--data.val", "{class_path: FileSource, init_args: {path: examples/hidden_digit/train.jsonl}}"),
    ],
    "too troubled": [*SMALL, "--model.environment", "parts.TroubledDigit", "--model.turns.step_deadline_s", "2"],
    "engine dies": [*SMALL, "--model.rollout", "parts.DiesOnce"],
    "no environment": [*SMALL, "--model.environment", "null"],
    "turns alone": [
        *("fit", "--config", "configs/quickstart.yaml", "--model.num_steps", "1", "--model.turns.max_turns", "3")
    ],
    "uncorrected": [*SMALL, "--model.partial_rollout.max_tokens_per_step", "3"],
    "no streaming": [
        *(*SMALL, "--model.partial_rollout.max_seconds_per_step", "3", "--model.algorithm.correction", "{}")
    ],
    "typo": [*SMALL, "--model.environment", "ToolEnvironmant"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environments")
    jobs = {name: Job([*line, "--run.dir", str(folder / name)]) for name, line in LINES.items()}
    return Runs(jobs, folder)


def metrics(runs: Runs, name: str) -> list[dict[str, float]]:
    runs.ended(name)
    return read_metrics(runs.folder / name / "001" / "metrics.jsonl")


@pytest.mark.nightly
def test_the_game_is_learned_from_scratch(runs):
    """Guesses at random earn -0.07 with four turns; whoever halves what is left earns 0.81 in 2.9 turns."""
    rows = metrics(runs, "learned")
    assert sum(row["reward/mean"] for row in rows[:3]) / 3 < 0.1
    assert sum(row["reward/mean"] for row in rows[-5:]) / 5 > 0.4
    assert rows[-1]["turns/mean"] < rows[0]["turns/mean"]
    assert all(row["mismatch/max"] < 1e-3 for row in rows)
    report = (runs.folder / "learned" / "001" / "report.html").read_text()
    assert "turns/mean" in report


def test_trouble_costs_its_own_trajectories(runs):
    """96 trajectories; 1 in 10 calls fails, so about a quarter of them, and all others are as they were.

    Step 2 is validated, and counts its own failures, not those of the validation.
    """
    rows = metrics(runs, "troubled")
    failures = [row["environment/failures"] for row in rows]
    assert all(4 <= each <= 16 for each in failures)
    assert [row["reward/error_share"] * 32 for row in rows] == pytest.approx(failures)
    assert max(row["environment/timed_out_threads"] for row in rows) == 1  # the one that hangs
    first, undisturbed = rows[0], metrics(runs, "undisturbed")[0]
    assert first["completion/num_tokens"] < undisturbed["completion/num_tokens"]
    assert first["filter/missing_share"] == 0


def test_too_much_trouble_stops_the_run(runs):
    result = runs["too troubled"]
    assert result.exit_code == 1
    assert "reward 'environment'" in result.message
    assert "the game server is gone" in result.message
    assert "Correct model.environment or its data" in result.message


def test_an_engine_that_dies_between_turns_changes_nothing(runs):
    rows, undisturbed = metrics(runs, "engine dies"), metrics(runs, "undisturbed")
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
    result = runs[name]
    assert result.exit_code == 2
    assert words.lower() in result.message.lower(), result.message[-800:]
