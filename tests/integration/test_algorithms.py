"""Every configuration in ``configs/algo`` runs, logs what its users watch, and trains what it says."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from command_line import ROOT, SMALL, Job, run_jobs

CONFIGS = sorted(path.stem for path in (ROOT / "configs" / "algo").glob("*.yaml"))
WITH_CRITIC = {"ppo", "vapo", "pf_ppo"}
EVERY_ALGORITHM = {
    *("policy/clip_fraction_low", "policy/clip_fraction_high", "policy/ratio_max", "policy/ratio_min"),
    *("policy/approx_kl", "policy/entropy", "advantages/degenerate_groups", "filter/refills", "filter/rejected_groups"),
    *("mismatch/weight_p1", "mismatch/weight_p50", "mismatch/weight_p99"),
}
OFF_POLICY = ["--model.batch.mini_batch_size", "8", "--model.optimizer.init_args.lr", "0.003"]
DRAWS = [
    *("--model.algorithm", "DAPO", "--model.algorithm.max_refills", "3", "--model.algorithm.over_sampling", "2.0"),
    *("--model.sampling.max_new_tokens", "4"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """Return the rows of ``metrics.csv`` of two steps with each configuration, and of some variants."""
    folder = tmp_path_factory.mktemp("algorithms")
    lines = {name: [*SMALL, "-c", f"configs/algo/{name}.yaml", *OFF_POLICY] for name in CONFIGS}
    lines["vapo"] += ["--model.critic.warmup_steps", "0"]  # the paper's is 50
    lines["dynamic"] = [*SMALL, *DRAWS]
    lines["warm-up"] = [*SMALL, "--model.algorithm", "PPO", "--model.critic", "{warmup_steps: 1, num_epochs: 3}"]
    lines["shared"] = [*SMALL, "--model.algorithm", "PPO", "--model.critic", "{share_trunk: true, warmup_steps: 1}"]
    jobs = {
        name: Job([*line, "--model.num_steps", "2", "--run.dir", str(folder / name)]) for name, line in lines.items()
    }
    results = run_jobs(jobs, folder)
    rows = {}
    for name, result in results.items():
        assert result.exit_code == 0, f"{name}: {result.output[-3000:]}"
        with (folder / name / "001" / "metrics.csv").open(newline="") as file:
            rows[name] = list(csv.DictReader(file))
    return rows


def test_there_is_a_configuration_for_each_algorithm() -> None:
    assert len(CONFIGS) == 11


@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_runs_and_logs_what_is_watched(runs: dict[str, list[dict[str, str]]], name: str) -> None:
    expected = EVERY_ALGORITHM
    if name in WITH_CRITIC:
        expected = expected | {"critic/loss", "critic/explained_variance", "critic/grad_norm", "critic/lr"}
    for row in runs[name]:
        assert not {metric for metric in expected if not math.isfinite(float(row[metric] or "nan"))}
    assert float(runs[name][0]["policy/ratio_max"]) >= 1 >= float(runs[name][0]["policy/ratio_min"])


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"dapo"}))
def test_the_second_mini_batch_is_off_policy(runs: dict[str, list[dict[str, str]]], name: str) -> None:
    assert any(float(row["policy/ratio_max"]) > 1 for row in runs[name])


def test_dynamic_sampling_draws_until_groups_have_a_signal(runs: dict[str, list[dict[str, str]]]) -> None:
    for row in runs["dynamic"]:
        drawn = round(float(row["completion/num_tokens"]) / float(row["completion/length_mean"]) / 4)
        rejected = float(row["filter/rejected_groups"])
        trained = float(row["filter/kept_share"]) * drawn
        assert float(row["advantages/degenerate_groups"]) == 0
        assert drawn >= 8  # 4 prompts a step, and twice as many drawn
        assert trained <= 4 + 1e-6
        assert (float(row["filter/refills"]) > 0) == (drawn > 8)
        assert 0 < rejected < 1


@pytest.mark.parametrize("name", ["warm-up", "shared"])
def test_a_critic_warms_up_before_the_policy_moves(runs: dict[str, list[dict[str, str]]], name: str) -> None:
    first, second = runs[name]

    assert first["loss"] == first["policy/lr"] == first["policy/grad_norm"] == ""
    assert float(first["critic/grad_norm"]) > 0
    assert float(first["mismatch/mean"]) < 1e-5  # still measured
    assert float(second["policy/grad_norm"]) > 0
    assert first["sync/seconds"] != ""
    assert second["sync/seconds"] == ""  # the engine has the policy's weights already


def test_validation_loads_no_critic(tmp_path: Path) -> None:
    line = ["validate", *SMALL[1:], "--model.algorithm", "PPO", "--model.critic", "{trunk: {path: ./none}}"]
    result = run_jobs({"validate": Job([*line, "--run.dir", str(tmp_path / "run")])}, tmp_path)["validate"]
    assert result.exit_code == 0, result.output[-3000:]
