"""Checkpoints that the loop or a thread writes: when they get their name, what is in them, and what goes wrong."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from rlplug.distributed.checkpoint import RLCheckpoint
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.errors import ConfigError, RunError
from rlplug.observability.phase_timer import PhaseTimer


class Run(LightningModule):
    """What :class:`RLCheckpoint` needs of a run. ``watch`` is called in each step, after the weights have changed."""

    automatic_optimization = False

    def __init__(self, run_dir: Path, num_steps: int, watch: Callable[[int], None]) -> None:
        super().__init__()
        self.run_dir, self.num_steps, self.watch = run_dir, num_steps, watch
        self.rollout_step = 0
        self.timer = PhaseTimer(stall_s=60)
        self.weights: dict[int, torch.Tensor] = {}

    def configure_model(self):
        if not hasattr(self, "network"):
            self.network = nn.Linear(3, 2)
            self.trainer.strategy.shard(self.network, torch.float32)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.network.parameters(), lr=0.1)

    def training_step(self, tick, index):
        self.manual_backward(self.network(torch.ones(1, 3)).sum())
        self.optimizers().step()
        self.rollout_step += 1
        self.weights[self.rollout_step] = self.network.weight.full_tensor().detach().clone()
        self.trainer.should_stop = self.rollout_step == self.num_steps
        self.watch(self.rollout_step)

    def names(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "checkpoints").iterdir())


@pytest.fixture
def fit(tmp_path) -> Iterator[Callable[..., Run]]:
    def fit(num_steps: int = 3, watch: Callable[[Run, int], None] = lambda run, step: None, **options) -> Run:
        run = Run(tmp_path, num_steps, lambda step: watch(run, step))
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            strategy=RLFSDP2Strategy(timeout_s=30),
            max_epochs=-1,
            callbacks=[RLCheckpoint(**options)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(run, train_dataloaders=torch.utils.data.DataLoader(range(num_steps)))
        return run

    with mock.patch.dict(os.environ):  # the strategy's launcher leaves WORLD_SIZE and others in it
        yield fit
    dist.destroy_process_group()


class Gate:
    """Holds back the data of checkpoints whose folder has ``name`` in it, until it opens."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.open, self.name, self.error = threading.Event(), name, error
        self.entered: list[str] = []
        self.threads: list[threading.Thread] = []

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = FileSystemWriter.write_data

        def write_data(writer, plan, planner):
            folder = Path(writer.path).name
            self.entered.append(folder)
            self.threads.append(threading.current_thread())
            if self.name in folder:
                assert self.open.wait(timeout=20)
                if self.error is not None:
                    raise self.error
            return original(writer, plan, planner)

        monkeypatch.setattr(FileSystemWriter, "write_data", write_data)


@pytest.fixture
def gate(monkeypatch) -> Callable[..., Gate]:
    def make(name: str, error: Exception | None = None) -> Gate:
        made = Gate(name, error)
        made.patch(monkeypatch)
        return made

    return make


def saved_weight(run: Run, step: int) -> torch.Tensor:
    file = run.run_dir / "whole.pt"
    dcp_to_torch_save(run.run_dir / "checkpoints" / f"step-{step:08d}", file)
    return torch.load(file, weights_only=False)["state_dict"]["network.weight"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newest_are_kept_and_the_last_is_there_when_the_run_ends(fit, asynchronous):
    run = fit(5, every_n_steps=2, keep=2, asynchronous=asynchronous)

    assert run.names() == ["step-00000004", "step-00000005"]
    for step in (4, 5):
        assert torch.equal(saved_weight(run, step), run.weights[step])
    assert not torch.equal(run.weights[4], run.weights[5])


def is_done(run: Run) -> bool:
    (callback,) = [each for each in run.trainer.callbacks if isinstance(each, RLCheckpoint)]
    return callback._writer.is_done


def test_training_goes_on_while_a_checkpoint_is_written(fit, gate, capsys):
    held, seen = gate("step-00000002"), {}

    def watch(run, step):
        seen[step] = run.names() if step > 2 else []
        if step == 4:
            assert not is_done(run)
            held.open.set()
            while not is_done(run):
                time.sleep(0.01)

    run = fit(5, watch, every_n_steps=2, asynchronous=True, keep=9)

    # 4 is due at the end of the step in which 2 is complete
    assert seen[3] == seen[4] == ["step-00000002.partial"]
    assert "step-00000002" in seen[5]
    assert held.entered == ["step-00000002.partial", "step-00000004.partial", "step-00000005.partial"]
    assert [thread is threading.main_thread() for thread in held.threads] == [False, False, True]
    assert run.names() == ["step-00000002", "step-00000004", "step-00000005"]
    for step in (2, 4, 5):  # of that step's end, though the weights changed before a byte was written
        assert torch.equal(saved_weight(run, step), run.weights[step])
    assert "step-00000002 was written in the background" in capsys.readouterr().err


def test_the_name_comes_with_the_end_of_the_step_in_which_writing_ended(fit, gate):
    held, seen = gate("step-00000002"), {}

    def watch(run, step):
        seen[step] = run.names() if step > 2 else []
        if step == 3:
            held.open.set()
            while not is_done(run):
                time.sleep(0.01)

    fit(5, watch, every_n_steps=2, asynchronous=True, keep=9)
    assert seen[3] == ["step-00000002.partial"]
    assert seen[4] == ["step-00000002"]


def test_the_next_save_waits_for_the_one_under_way(fit, gate):
    held, seen = gate("step-00000001"), {}

    def watch(run, step):
        seen[step] = run.names() if step > 1 else []
        if step == 2:  # open while the end of the step waits
            threading.Timer(0.3, held.open.set).start()

    run = fit(3, watch, every_n_steps=1, asynchronous=True, keep=9)
    assert seen[2] == ["step-00000001.partial"]
    assert "step-00000001" in seen[3]
    assert run.timer.pop_metrics()["time/checkpoint"] > 0.2
    assert run.names() == ["step-00000001", "step-00000002", "step-00000003"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_write_stops_the_run_and_leaves_the_former_checkpoint(fit, gate, tmp_path, asynchronous):
    held = gate("step-00000003", error=OSError("no space left"))
    held.open.set()
    steps = []
    with pytest.raises(
        RunError, match=r"step-00000003 could not be written: .*no space left.* step-00000002 is complete"
    ):
        fit(9, lambda run, step: steps.append(step), every_n_steps=1, asynchronous=asynchronous)
    assert steps == ([1, 2, 3, 4] if asynchronous else [1, 2, 3])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("exception", [ZeroDivisionError, KeyboardInterrupt])
def test_a_run_that_fails_completes_the_checkpoint_under_way(fit, gate, tmp_path, exception):
    held = gate("step-00000002")

    def watch(run, step):
        if step == 3:
            threading.Timer(0.3, held.open.set).start()
            raise exception

    # Lightning turns a KeyboardInterrupt into an exit
    with pytest.raises((ZeroDivisionError, KeyboardInterrupt, SystemExit)):
        fit(9, watch, every_n_steps=2, asynchronous=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_run_that_fails_says_that_the_write_failed_too(fit, gate, capsys):
    held = gate("step-00000002", error=OSError("no space left"))
    held.open.set()

    def watch(run, step):
        if step == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(9, watch, every_n_steps=2, asynchronous=True)
    assert "step-00000002 could not be written: OSError: no space left" in " ".join(capsys.readouterr().err.split())


def test_what_killed_saves_have_left_is_removed(fit, tmp_path):
    (tmp_path / "checkpoints" / "step-00000007.partial").mkdir(parents=True)
    assert fit(2, every_n_steps=9).names() == ["step-00000002"]


@pytest.mark.parametrize("key", ["every_n_steps", "keep"])
def test_sizes_that_save_nothing_are_refused(key):
    with pytest.raises(ConfigError, match=rf"^checkpoint\.{key} is 0: give a number from 1"):
        RLCheckpoint(**{key: 0})
