"""Every configuration in ``configs/algo`` runs, logs what its users watch, and trains what it says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from command_line import ROOT, SMALL, Job, Runs, run_job, samples

from rlplug.observability.metrics_log import read_metrics

CONFIGS = sorted(path.stem for path in (ROOT / "configs" / "algo").glob("*.yaml"))
ON_EVERY_PUSH = ("grpo", "ppo")
"""The plainest one, and one with a critic; the others run nightly."""
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
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two steps with each configuration, and with some variants."""
    folder = tmp_path_factory.mktemp("algorithms")
    lines = {name: [*SMALL, "-c", f"configs/algo/{name}.yaml", *OFF_POLICY] for name in CONFIGS}
    lines["vapo"] += ["--model.critic.warmup_steps", "0"]  # the paper's is 50
    lines["dynamic"] = [*SMALL, *DRAWS]
    lines["warm-up"] = [*SMALL, "--model.algorithm", "PPO", "--model.critic", "{warmup_steps: 1, num_epochs: 3}"]
    lines["shared"] = [*SMALL, "--model.algorithm", "PPO", "--model.critic", "{share_trunk: true, warmup_steps: 1}"]
    jobs = {
        name: Job([*line, "--model.num_steps", "2", "--run.dir", str(folder / name)]) for name, line in lines.items()
    }
    return Runs(jobs, folder)


def rows_of(runs: Runs, name: str) -> list[dict[str, float]]:
    runs.ended(name)
    return read_metrics(runs.folder / name / "001" / "metrics.jsonl")


def test_there_is_a_configuration_for_each_algorithm() -> None:
    assert len(CONFIGS) == 11


@pytest.mark.parametrize("name", samples(CONFIGS, *ON_EVERY_PUSH))
def test_every_configuration_runs_and_logs_what_is_watched(runs: Runs, name: str) -> None:
    expected = EVERY_ALGORITHM
    if name in WITH_CRITIC:
        expected = expected | {"critic/loss", "critic/explained_variance", "critic/grad_norm", "critic/lr"}
    rows = rows_of(runs, name)
    for row in rows:
        assert not {metric for metric in expected if not math.isfinite(row.get(metric, math.nan))}
    assert rows[0]["policy/ratio_max"] >= 1 >= rows[0]["policy/ratio_min"]


@pytest.mark.parametrize("name", samples([name for name in CONFIGS if name != "dapo"], *ON_EVERY_PUSH))
def test_the_second_mini_batch_is_off_policy(runs: Runs, name: str) -> None:
    assert any(row["policy/ratio_max"] > 1 for row in rows_of(runs, name))


def test_dynamic_sampling_draws_until_groups_have_a_signal(runs: Runs) -> None:
    for row in rows_of(runs, "dynamic"):
        drawn = round(row["completion/num_tokens"] / row["completion/length_mean"] / 4)
        rejected = row["filter/rejected_groups"]
        trained = row["filter/kept_share"] * drawn
        assert row["advantages/degenerate_groups"] == 0
        assert drawn >= 8  # 4 prompts a step, and twice as many drawn
        assert trained <= 4 + 1e-6
        assert (row["filter/refills"] > 0) == (drawn > 8)
        assert 0 < rejected < 1


@pytest.mark.parametrize("name", ["warm-up", "shared"])
def test_a_critic_warms_up_before_the_policy_moves(runs: Runs, name: str) -> None:
    first, second = rows_of(runs, name)

    assert not first.keys() & {"loss", "policy/lr", "policy/grad_norm"}
    assert first["critic/grad_norm"] > 0
    assert first["mismatch/mean"] < 1e-5  # still measured
    assert second["policy/grad_norm"] > 0
    assert "sync/seconds" in first
    assert "sync/seconds" not in second  # the engine has the policy's weights already


def test_validation_loads_no_critic_and_starts_rewards(tmp_path: Path) -> None:
    line = ["validate", *SMALL[1:], "--model.algorithm", "PPO", "--model.critic", "{trunk: {path: ./none}}"]
    line.append("--model.rewards+=parts.PlacedReward")
    result = run_job(Job([*line, "--run.dir", str(tmp_path / "run")]), tmp_path / "log")
    assert result.exit_code == 0, result.output[-3000:]
    assert "reward_counts/placed/scored │ 100 " in result.message, "it refuses to score without its device"
