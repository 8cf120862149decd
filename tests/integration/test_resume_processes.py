"""Runs of 2 and 4 processes, killed while a checkpoint is written in the background, and resumed on any number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Job, Runs, samples
from test_resume import ACTOR_CRITIC, assert_same_run, metrics
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_flatten_with_path

from rlplug.distributed.checkpoints.files import list_checkpoints

RUN = [
    *(*ACTOR_CRITIC, "--model.num_steps", "4", "--model.batch.num_epochs", "1", "--model.batch.mini_batch_size", "16"),
    *("--model.batch.max_tokens_per_gpu", "null", "--model.validation.every_n_steps", "null"),
    *("--run.samples_per_step", "16", "--checkpoint.every_n_steps", "1", "--checkpoint.asynchronous", "true"),
]
RESUMED = [(2, 2), (2, 1), (2, 4), (4, 4), (4, 2)]
"""Number of processes of the run that was killed, and of the one that went on."""


def job(arguments: list[str], num_ranks: int, **extra: Any) -> Job:
    return Job([*arguments, "--trainer.devices", str(num_ranks)], extra, num_ranks=num_ranks)


class Finished(Runs):
    """Runs of several processes, by name, each in a folder of its own."""

    def run_dir(self, name: str) -> Path:
        """Return the folder of a run that has ended as it must on every rank."""
        code = 0 if "signal" not in self.jobs[name].extra else -9
        self.ended(name, [code] * (self.jobs[name].num_ranks or 1))
        return self.folder / name / "001"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Undisturbed, killed and resumed runs; the kill comes in step 4, while step 3's checkpoint is still written."""
    folder = tmp_path_factory.mktemp("processes")
    jobs = {}
    for num_ranks in (2, 4):
        name = str(num_ranks)
        jobs[name] = job([*RUN, "--run.dir", str(folder / name)], num_ranks)
        stop = {"signal": "SIGKILL", "phase": "update", "step": 4, "hold_write": "step-00000003"}
        jobs[f"{name}-killed"] = job([*RUN, "--run.dir", str(folder / f"{name}-killed")], num_ranks, **stop)
    for before, after in RESUMED:
        name = f"{before}-on-{after}"
        jobs[name] = job(["fit", "--resume", str(folder / name / "001")], after)
        jobs[name].after = f"{before}-killed"
        jobs[name].copy = (folder / f"{before}-killed", folder / name)
    return Finished(jobs, folder)


def last_checkpoint(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the newest checkpoint, unsharded, and the optimizers' other numbers."""
    whole = run_dir / "whole.pt"
    dcp_to_torch_save(list_checkpoints(run_dir)[-1], whole)
    leaves, _ = tree_flatten_with_path(torch.load(whole, weights_only=False))
    numbers = {str(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor | float | int)}
    return {name: torch.as_tensor(leaf) for name, leaf in numbers.items()}


@pytest.mark.parametrize("num_ranks", samples((2, 4), 2))
def test_the_kill_came_while_a_checkpoint_was_written(finished: Finished, num_ranks: int) -> None:
    checkpoints = finished.run_dir(f"{num_ranks}-killed") / "checkpoints"

    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "step-00000001",
        "step-00000002",
        "step-00000003.partial",
    ]
    assert (checkpoints / "step-00000003.partial" / f"__{num_ranks - 1}_0.distcp").stat().st_size > 0
    assert len(metrics(checkpoints.parent)) == 3  # the steps went on meanwhile


@pytest.mark.parametrize("num_ranks", samples((2, 4), 2))
def test_resumed_on_the_same_number_equals_undisturbed(finished: Finished, num_ranks: int) -> None:
    resumed, undisturbed = map(finished.run_dir, (f"{num_ranks}-on-{num_ranks}", str(num_ranks)))

    assert_same_run(resumed, undisturbed)
    last, expected = last_checkpoint(resumed), last_checkpoint(undisturbed)
    assert last.keys() == expected.keys()
    assert all(torch.equal(last[name], expected[name]) for name in expected)
    left = [path.name for path in (resumed / "checkpoints").iterdir()]
    assert sorted(left) == ["step-00000003", "step-00000004"]  # and nothing of the save that was killed


@pytest.mark.parametrize(("before", "after"), samples([pair for pair in RESUMED if pair[0] != pair[1]], (2, 1)))
def test_resumed_on_another_number_it_is_equal_up_to_round_off(finished: Finished, before: int, after: int) -> None:
    resumed, undisturbed = map(finished.run_dir, (f"{before}-on-{after}", str(before)))

    rows, expected_rows = metrics(resumed), metrics(undisturbed)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row, expected_row in zip(rows, expected_rows, strict=True):
        for name in ("loss", "policy/grad_norm", "policy/kl", "critic/loss", "critic/grad_norm", "reward/mean"):
            if expected_row.get(name):  # the warm-up of the critic has no loss of the policy
                assert float(row[name]) == pytest.approx(float(expected_row[name]), rel=1e-3, abs=1e-5), name
    assert (resumed / "samples.jsonl").read_text() == (undisturbed / "samples.jsonl").read_text()
    last, expected = last_checkpoint(resumed), last_checkpoint(undisturbed)
    assert last.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(last[name], tensor, rtol=1e-3, atol=2e-4 if "state_dict" in name else 1e-6, msg=name)
