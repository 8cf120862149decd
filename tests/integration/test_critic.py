"""PPO learns the task of ``benchmarks/credit.py`` with its critic, and does not with a broken one.

On the quickstart a critic that explains a tenth of the variance is enough. Here values that are shifted by a token, a
critic that does not train, or returns of the wrong state leave the reward where it began.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest
from command_line import ROOT, Job, run_job

from rlplug.observability.metrics_log import read_metrics

WHOLE = [(seed, 40, 0.8) for seed in range(3)]
"""Seed, steps, and what the mean reward of the last five steps passes."""
pytestmark = pytest.mark.nightly


@pytest.fixture
def credit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("credit")


def final_reward(arguments: list[str], seed: int, num_steps: int, folder: Path) -> float:
    line = [
        *("fit", "--config", "configs/quickstart.yaml", "--run.report", "false", "--run.dir", str(folder)),
        *("--model.num_steps", str(num_steps), "--model.seed", str(seed), "--model.policy.seed", str(seed)),
        *("--model.validation.at_start", "false", "--model.validation.every_n_steps", "null"),
        *arguments,
    ]
    result = run_job(Job(line), folder.with_suffix(".log"))
    assert result.exit_code == 0, result.output[-3000:]
    rewards = [row["reward/mean"] for row in read_metrics(folder / "001/metrics.jsonl") if "reward/mean" in row]
    assert len(rewards) == num_steps
    return fmean(rewards[-5:])


@pytest.mark.parametrize(("seed", "num_steps", "threshold"), WHOLE)
def test_ppo_learns_with_its_critic(
    credit: ModuleType, seed: int, num_steps: int, threshold: float, tmp_path: Path
) -> None:
    assert final_reward(credit.arguments(seed)["PPO"], seed, num_steps, tmp_path / "run") > threshold


@pytest.mark.parametrize(("seed", "num_steps"), [(seed, num_steps) for seed, num_steps, _ in WHOLE])
def test_ppo_fails_with_a_broken_critic(credit: ModuleType, seed: int, num_steps: int, tmp_path: Path) -> None:
    """Otherwise the task would not show whether the critic works."""
    assert final_reward(credit.arguments(seed)["PPO, broken critic"], seed, num_steps, tmp_path / "run") < 0.2
