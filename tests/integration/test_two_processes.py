"""The same run on one process and on two gloo processes, however those are started, up to round-off.

Every night alone, ranks that Lightning or torchrun starts: on a push, test_stopped_ranks.py lets Lightning start one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import ROOT, Job, Runs, run_job, samples
from safetensors.torch import load_file

from rlplug.observability.metrics_log import read_metrics

RUN = [
    *("fit", "--config", "configs/quickstart.yaml", "--model.num_steps", "3"),
    *("--model.policy.path", "tests/model"),
    *("--model.batch.prompts_per_step", "8", "--model.batch.group_size", "4", "--model.batch.mini_batch_size", "16"),
    *("--model.batch.num_epochs", "2", "--model.batch.micro_batch_size_per_gpu", "5"),
    *("--model.algorithm.kl_coefficient", "0.05", "--run.report", "false"),
]
ACTOR_CRITIC = [
    *(*RUN, "--model.algorithm", "PPO", "--model.algorithm.kl_coefficient", "0.05"),
    *("--model.critic", "{optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.001}}}"),
]
SHARED_TRUNK = [
    *(*RUN, "--model.algorithm", "PPO", "--model.critic", "{share_trunk: true}"),
    *("--model.algorithm.kl_in", "loss", "--model.algorithm.kl_coefficient", "0.05"),
]
DYNAMIC = [*RUN, "--model.algorithm", "DAPO", "--model.algorithm.kl_coefficient", "0.05"]
"""Refills that lack a single prompt leave one of two ranks without any."""
PARTIAL = [
    *("fit", "--config", "configs/hidden_digit.yaml", "--model.num_steps", "5", "--run.report", "false"),
    *("--model.batch.prompts_per_step", "6", "--model.batch.group_size", "4", "--model.algorithm.correction", "{}"),
    *("--model.partial_rollout", "{max_tokens_per_step: 2, groups_in_flight: 9}"),
    *("--model.algorithm.kl_coefficient", "0.05"),
]
"""Of nine groups, each rank's engine works on some, and how long one takes depends on its guesses."""
ADAPTERS = [*RUN, "--model.lora", "{rank: 4, alpha: 8}"]
"""The reference is the policy without its adapters."""
PAIRS = {
    "plain": RUN,
    "adapters": ADAPTERS,
    "critic": ACTOR_CRITIC,
    "shared": SHARED_TRUNK,
    "dynamic": DYNAMIC,
    "partial": PARTIAL,
}
"""What runs on one process, and on two that torchrun's variables make ranks; the plainest is started in every way."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rlplug"]
WAYS = [(name, f"{name}-two") for name in PAIRS] + [("plain", "lightning"), ("plain", "torchrun")]

ON_A_PUSH = WAYS[:1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("two")
    jobs = {name: Job([*line, "--run.dir", str(folder / name)]) for name, line in PAIRS.items()}
    for name, line in PAIRS.items():
        two = [*line, "--trainer.devices", "2", "--run.dir", str(folder / f"{name}-two")]
        jobs[f"{name}-two"] = Job(two, num_ranks=2)
    jobs["lightning"] = Job([*RUN, "--trainer.devices", "2", "--run.dir", str(folder / "lightning")])
    return Runs(jobs, folder)


def folder_of(runs: Runs, name: str) -> Path:
    """Return the run folder of a run, which is made at the first call."""
    folder = runs.folder / name / "001"
    if name in runs.jobs:
        runs.ended(name, [0, 0] if name.endswith("-two") else 0)
    elif not folder.exists():
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [*TORCHRUN, *RUN, "--trainer.devices", "2", "--run.dir", str(folder.parent)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return folder


def rows(run_dir: Path) -> list[dict[str, float]]:
    return read_metrics(run_dir / "metrics.jsonl")


@pytest.mark.parametrize(("alone", "together"), samples(WAYS, *ON_A_PUSH))
def test_two_processes_give_the_result_of_one(runs: Runs, alone: str, together: str) -> None:
    folders = folder_of(runs, alone), folder_of(runs, together)
    one, two = map(rows, folders)
    compared = {"loss", "policy/grad_norm", "policy/entropy", "policy/kl", "reward/mean", "completion/length_mean"}
    compared |= {"filter/refills", "filter/rejected_groups"}
    if alone in ("critic", "shared"):
        compared |= {"critic/loss", "critic/grad_norm", "critic/explained_variance"}

    assert len(two) == len(one) == (5 if alone == "partial" else 4)  # most have step 0, the validation before training
    for name in compared:
        for row_one, row_two in zip(one[1:], two[1:], strict=True):
            assert float(row_two[name]) == pytest.approx(float(row_one[name]), rel=1e-3, abs=1e-5), name
    assert (folders[1] / "samples.jsonl").read_text() == (folders[0] / "samples.jsonl").read_text()


@pytest.mark.parametrize(("alone", "together"), samples(WAYS, *ON_A_PUSH))
def test_two_processes_train_the_same_weights(runs: Runs, alone: str, together: str) -> None:
    one = load_file(folder_of(runs, alone) / "policy" / "model.safetensors")
    two = load_file(folder_of(runs, together) / "policy" / "model.safetensors")

    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=2e-4)


def test_sizes_that_do_not_divide_over_two_processes_are_refused(tmp_path: Path) -> None:
    line = [*RUN, "--trainer.devices", "2", "--model.batch.prompts_per_step", "7", "--run.dir", str(tmp_path)]
    result = run_job(Job(line, num_ranks=2), tmp_path / "log")

    assert result.exit_code == [2, 2]
    assert "prompts_per_step is 7, which does not divide over 2 ranks. Nearest that do: 6 and 8." in result.message
    assert "Traceback" not in result.output
