"""The same run on one process and on two gloo processes, however they are started, up to round-off."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
RUN = [
    *("fit", "--config", "configs/quickstart.yaml", "--model.num_steps", "4"),
    *("--model.policy.path", "tests/model"),
    *("--model.batch.prompts_per_step", "8", "--model.batch.group_size", "4", "--model.batch.mini_batch_size", "16"),
    *("--model.batch.num_epochs", "2", "--model.batch.micro_batch_size_per_gpu", "3"),
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
STARTED_BY = {
    "one": [sys.executable, "-m", "rlplug", *RUN],
    "lightning": [sys.executable, "-m", "rlplug", *RUN, "--trainer.devices", "2"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rlplug"),
        *(*RUN, "--trainer.devices", "2"),
    ],
    "critic-one": [sys.executable, "-m", "rlplug", *ACTOR_CRITIC],
    "critic-two": [sys.executable, "-m", "rlplug", *ACTOR_CRITIC, "--trainer.devices", "2"],
    "shared-one": [sys.executable, "-m", "rlplug", *SHARED_TRUNK],
    "shared-two": [sys.executable, "-m", "rlplug", *SHARED_TRUNK, "--trainer.devices", "2"],
    "dynamic-one": [sys.executable, "-m", "rlplug", *DYNAMIC],
    "dynamic-two": [sys.executable, "-m", "rlplug", *DYNAMIC, "--trainer.devices", "2"],
    "partial-one": [sys.executable, "-m", "rlplug", *PARTIAL],
    "partial-two": [sys.executable, "-m", "rlplug", *PARTIAL, "--trainer.devices", "2"],
}
PAIRS = [
    *(("one", "lightning"), ("one", "torchrun")),
    *(("critic-one", "critic-two"), ("shared-one", "shared-two"), ("dynamic-one", "dynamic-two")),
    ("partial-one", "partial-two"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run each way and return the run folders."""
    folder = tmp_path_factory.mktemp("two")
    for name, command in STARTED_BY.items():
        done = subprocess.run(
            [*command, "--run.dir", str(folder / name)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return {name: folder / name / "001" for name in STARTED_BY}


def rows(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("alone", "together"), PAIRS)
def test_two_processes_give_the_result_of_one(runs: dict[str, Path], alone: str, together: str) -> None:
    one, two = rows(runs[alone]), rows(runs[together])
    compared = {"loss", "policy/grad_norm", "policy/entropy", "policy/kl", "reward/mean", "completion/length_mean"}
    compared |= {"filter/refills", "filter/rejected_groups"}
    if alone in ("critic-one", "shared-one"):
        compared |= {"critic/loss", "critic/grad_norm", "critic/explained_variance"}

    assert len(two) == len(one) == 5  # step 0 is the validation before training
    for name in compared:
        for row_one, row_two in zip(one[1:], two[1:], strict=True):
            assert float(row_two[name]) == pytest.approx(float(row_one[name]), rel=1e-3, abs=1e-5), name
    assert (runs[together] / "samples.jsonl").read_text() == (runs[alone] / "samples.jsonl").read_text()


@pytest.mark.parametrize(("alone", "together"), PAIRS)
def test_two_processes_train_the_same_weights(runs: dict[str, Path], alone: str, together: str) -> None:
    one = load_file(runs[alone] / "policy" / "model.safetensors")
    two = load_file(runs[together] / "policy" / "model.safetensors")

    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=2e-4)


def test_sizes_that_do_not_divide_over_two_processes_are_refused(tmp_path: Path) -> None:
    command = [*STARTED_BY["lightning"], "--model.batch.prompts_per_step", "7", "--run.dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 2
    assert "prompts_per_step is 7, which does not divide over 2 ranks. Nearest that do: 6 and 8." in done.stderr
    assert "Traceback" not in done.stderr
