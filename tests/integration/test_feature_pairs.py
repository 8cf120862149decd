"""Each two features of a run, in two steps: what one promises holds beside the other.

A feature's promise is checked in each of its pairs, so a new feature is a line of :data:`feature_cases.FEATURES`, and
what two refuse together a line of :data:`feature_cases.REFUSED`. ``benchmarks/feature_pairs.py`` makes a table of what
came of a night.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from command_line import SMALL, Job, Runs, run_job, samples
from experts_model import make_experts_model
from feature_cases import AFTER, BASE, FEATURES, PAIRS, REFUSED, TIMED
from feature_promises import Rows, Same, trained

from rlplug.observability.metrics_log import read_metrics

OF_ROLLOUT = ("reward/mean", "completion/num_tokens")
OF_STEP = (*OF_ROLLOUT, "loss", "policy/grad_norm", "policy/entropy", "critic/loss")


def job(names: tuple[str, ...], places: Mapping[str, str], folder: Path) -> Job:
    """Return a run with the features; those with files of their own come first, whose values others change."""
    ordered = sorted(names, key=lambda name: "-c" not in FEATURES[name].arguments)
    words = [word for name in ordered for word in FEATURES[name].arguments]
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    num_ranks = max((FEATURES[name].num_ranks or 0 for name in names), default=0) or None
    after = next(filter(None, (FEATURES[name].after for name in names)), None)
    return Job([*SMALL, *BASE, *words, *AFTER, "--run.dir", str(folder)], num_ranks=num_ranks, after=after)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the features' ``experts/model``, a mixture of experts, and ``lora/adapter`` stand for."""
    folder = tmp_path_factory.mktemp("alone")
    experts = make_experts_model(folder / "experts")
    return {"experts/model": str(experts), "lora/adapter": str(folder / "lora" / "001" / "adapter")}


@pytest.fixture(scope="module")
def alone(places: dict[str, str]) -> Runs:
    """Runs with one feature, which its pairs are compared with; each runs when a pair first asks for it."""
    folder = Path(places["experts/model"]).parent
    return Runs({name: job((name,), places, folder / name) for name in FEATURES}, folder)


def of_ranks(code: int, of: Job) -> int | list[int]:
    """Return what ``run_job`` has as the exit code where all ranks of a job end with one."""
    return [code] * of.num_ranks if of.num_ranks else code


def rows_of(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of the two steps of a run."""
    rows = read_metrics(folder / "001" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    return rows


def assert_same(rows: Rows, others: Rows, same: Same, what: str) -> None:
    for row, other in zip(rows[:1] if same == "rollout" else rows, others, strict=False):
        for name in OF_ROLLOUT if same == "rollout" else OF_STEP:
            expected: object = other.get(name)
            if same == "steps" and name in other:
                expected = pytest.approx(other[name], rel=1e-4, abs=1e-6)
            assert row.get(name) == expected, f"{what}: {name} of step {row['step']} is {row.get(name)}, {expected}"


def assert_promises(names: tuple[str, str], rows: Rows, run: Path) -> None:
    assert all(math.isfinite(value) for row in rows for value in row.values()), f"not finite: {rows}"
    assert all(row["policy/grad_norm"] > 0 for row in trained(rows)), f"no gradient: {rows}"
    for name in names:
        assert FEATURES[name].holds(rows, run), f"{name} promises that {FEATURES[name].promises}: {rows}"


@pytest.mark.parametrize(("one", "other"), samples(PAIRS, ("lora", "kl penalty"), ("critic warm-up", "schedule")))
def test_two_features_keep_their_promises(
    tmp_path: Path, alone: Runs, places: dict[str, str], one: str, other: str
) -> None:
    """Alone catches features that are right alone: a reference that is not the first policy, a rate that goes on."""
    names = (one, other)
    first = job(names, places, tmp_path)
    if first.after is not None:
        alone.ended(first.after)
    result = run_job(first, tmp_path / "log")
    if named := REFUSED.get(frozenset(names)):
        assert result.exit_code == of_ranks(2, first), result.output[-3000:]
        assert named in result.message
        return
    resume = Job(["fit", "--resume", str(tmp_path / "001")], num_ranks=first.num_ranks)
    if any(FEATURES[name].killed_as for name in names):
        assert result.exit_code == of_ranks(-9, first), result.output[-3000:]
        result = run_job(resume, tmp_path / "log")
    assert result.exit_code == of_ranks(0, first), result.output[-3000:]
    rows = rows_of(tmp_path)
    assert_promises(names, rows, tmp_path / "001")
    for name, beside in (names, names[::-1]):
        if (same := FEATURES[name].same) and beside not in TIMED:
            whole = FEATURES[beside].killed_as or beside
            alone.ended(whole, of_ranks(0, alone.jobs[whole]))
            assert_same(rows, rows_of(alone.folder / whole), same, f"{beside} with {name}")
    if any(FEATURES[name].resumes for name in names):
        resume.arguments += ["--ckpt_path", str(tmp_path / "001" / "checkpoints" / "step-00000001")]
        result = run_job(resume, tmp_path / "log")
        assert result.exit_code == of_ranks(0, first), result.output[-3000:]
        again = rows_of(tmp_path)
        assert_promises(names, again, tmp_path / "001")
        if not TIMED.intersection(names):
            assert_same(again, rows, "numbers", "resumed")
