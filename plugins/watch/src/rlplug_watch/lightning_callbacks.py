"""Calls Lightning's ``EarlyStopping`` and ``ModelCheckpoint`` after each RL step, of which its loop does not know."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from rlplug.distributed.checkpoint import WRITE_ERRORS, write_failure
from rlplug.distributed.checkpoints.files import OTHERS
from rlplug.distributed.checkpoints.reader import READ_ERRORS
from rlplug.errors import ConfigError, RunError, did_you_mean
from rlplug.interfaces.observer import RunObserver, StepRecord

FOLDER: Final = "best"
"""Folder in a run's folder for the checkpoints of a ``ModelCheckpoint`` without ``dirpath``."""
_VALIDATION: Final = "validate/"
_SCORE: Final = re.compile(r"(.*/)?(reward[/_]mean|reward_low|reward_high|pass@\d+)")
"""Metrics of which more is better, and for which Lightning's default, ``mode: min``, takes the worst."""


class LightningCallbacks(Callback, RunObserver):
    """Callback that calls those of Lightning's that act on a metric, after each step that has the metric.

    To Lightning, a run is one epoch of batches without validation, at whose end its callbacks would act. Here
    ``EarlyStopping`` looks after each step whose metrics have ``monitor``, which for ``validate/...`` are those with a
    validation. ``ModelCheckpoint`` does too, at multiples of ``every_n_train_steps`` where that is set, which counts RL
    steps; without ``monitor`` and ``every_n_train_steps`` it saves after the last step. What it saves can be resumed
    with ``--ckpt_path``. Of a resumed run, what was saved in its folder after the checkpoint is set aside.

    Lightning 2.6 has no public way to take its own turns from these callbacks or to give them others. This class uses
    ``_every_n_train_steps``, ``_every_n_epochs``, ``_monitor_candidates``, ``_save_topk_checkpoint`` and
    ``_save_last_checkpoint`` of ``ModelCheckpoint``, and ``_check_on_train_epoch_end`` of ``EarlyStopping``;
    ``test_resume_options.py`` and ``test_trainer_options.py`` notice when these change.

    Args:
        callbacks: All callbacks of the trainer.
    """

    def __init__(self, callbacks: list[Callback]) -> None:
        self.stoppers = [callback for callback in callbacks if isinstance(callback, EarlyStopping)]
        self.savers = {
            callback: callback._every_n_train_steps for callback in callbacks if isinstance(callback, ModelCheckpoint)
        }
        for callback in self.savers:
            callback._every_n_train_steps = callback._every_n_epochs = 0  # its own hooks count optimizer steps
            if callback.save_last is True and callback.save_top_k != 0:
                callback.save_last = "link"  # a copy would be written over the last one, and could be torn
        for stopper in self.stoppers:
            stopper._check_on_train_epoch_end = False
        self._metrics: Mapping[str, float] = {}
        self._resumed_after = 0
        """Step of the checkpoint that the run resumes from, until its first step has ended."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        for callback in self.savers:
            if callback.dirpath is None:
                callback.dirpath = str(pl_module.run_dir / FOLDER)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Refuse to monitor a validation that never comes, and to take the lowest of rewards."""
        validation, last = pl_module.config.validation, pl_module.plan.total_steps
        self._resumed_after = pl_module.rollout_step
        first = pl_module.rollout_step + (not validation.beside_training)
        is_due = any(validation.is_due(step) for step in range(first, last + 1))
        for saver in self.savers:
            if validation.beside_training and (saver.monitor or "").startswith(_VALIDATION):
                raise ConfigError(
                    f"ModelCheckpoint monitors {saver.monitor!r}, and with model.validation.beside_training a score "
                    "comes when the weights that it is of have changed: set that to false."
                )
        watching: list[Any] = [*self.stoppers, *self.savers]
        for callback in watching:
            if callback.mode == "min" and _SCORE.fullmatch(callback.monitor or ""):
                name, does = type(callback).__name__, "stops when that rises"
                raise ConfigError(
                    f"trainer.callbacks: {name} monitors {callback.monitor!r} with mode min, its default, and so "
                    f"{does if callback in self.stoppers else 'keeps the lowest'}: set init_args.mode to max."
                )
            if (callback.monitor or "").startswith(_VALIDATION) and not is_due:
                raise ConfigError(
                    f"{type(callback).__name__} monitors {callback.monitor!r}, and the run's {last} steps have no "
                    "validation: set model.validation.every_n_steps."
                )

    def step_ended(self, record: StepRecord) -> None:
        self._metrics = record.metrics

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.rollout_step != pl_module.step:
            return  # an interrupt took the step back
        if self._resumed_after and self.savers:
            self._go_back(trainer, pl_module.run_dir / FOLDER)
        metrics = self._metrics
        for stopper in self.stoppers:
            if self._has_metric(stopper, metrics, pl_module.step, stopper.strict):
                self._look(stopper, trainer, pl_module)
        for saver, every_n_steps in self.savers.items():
            if self._is_due(saver, every_n_steps, trainer, metrics, pl_module.step):
                with pl_module.timer.phase("checkpoint"):
                    self._save(saver, trainer, pl_module)

    def _go_back(self, trainer: Trainer, folder: Path) -> None:
        """Set aside what was saved after the checkpoint, and forget what later steps have replaced. Collective."""
        if trainer.is_global_zero:
            _set_aside_after(folder, self._resumed_after)
        self._resumed_after = 0
        for saver in self.savers:
            gone = [path for path in saver.best_k_models if not Path(path).exists()]
            for path in trainer.strategy.broadcast(gone):
                del saver.best_k_models[path]

    def _look(self, stopper: EarlyStopping, trainer: Trainer, module: Any) -> None:
        """Let a stopper decide, and say when it ends the run."""
        stops_already = trainer.should_stop
        stopper.on_validation_end(trainer, module)
        if trainer.should_stop and not stops_already:
            reason = str(stopper.stopping_reason_message).removesuffix(" Signaling Trainer to stop.")
            trainer.print(f"EarlyStopping ends the run after step {module.step}: {reason}")

    def _save(self, saver: ModelCheckpoint, trainer: Trainer, module: Any) -> None:
        """Let a saver write.

        Raises:
            RunError: Writing failed.
        """
        candidates = saver._monitor_candidates(trainer)
        try:
            saver._save_topk_checkpoint(trainer, candidates)
            saver._save_last_checkpoint(trainer, candidates)
        except WRITE_ERRORS as error:
            raise RunError(write_failure(Path(str(saver.dirpath)), module.run_dir, error)) from error

    def _is_due(
        self, saver: ModelCheckpoint, every_n_steps: int, trainer: Trainer, metrics: Mapping[str, float], step: int
    ) -> bool:
        """Return whether to save after this step."""
        if saver.monitor is None and every_n_steps == 0:
            return bool(trainer.should_stop)
        if every_n_steps and step % every_n_steps and not trainer.should_stop:
            return False
        return saver.monitor is None or self._has_metric(saver, metrics, step, is_required=True)

    def _has_metric(self, callback: Any, metrics: Mapping[str, float], step: int, is_required: bool) -> bool:
        """Return whether the step has the monitored metric.

        Raises:
            RunError: No step has it.
        """
        name = callback.monitor
        if name in metrics:
            return True
        is_validation = name.startswith(_VALIDATION)
        if is_required and not (is_validation and not any(found.startswith(_VALIDATION) for found in metrics)):
            raise RunError(
                f"step {step}: {type(callback).__name__} monitors {name!r}, and there is no such metric."
                f"{did_you_mean(name, metrics)} There are {', '.join(sorted(metrics))}."
            )
        return False


def _set_aside_after(folder: Path, step: int) -> None:
    """Move the checkpoints in a folder that are of later steps to ``abandoned-1`` in it, or the next number."""
    later = [path.parent for path in folder.glob(f"*/{OTHERS}") if _step_of(path) > step]
    if not later:
        return
    aside = next(path for number in itertools.count(1) if not (path := folder / f"abandoned-{number}").exists())
    aside.mkdir()
    for path in later:
        path.rename(aside / path.name)
    print(f"what ModelCheckpoint saved after step {step} is now in {aside}")


def _step_of(path: Path) -> int:
    """Return the RL step of a checkpoint; 0 where it cannot be read."""
    try:
        return int(torch.load(path, weights_only=True)["rlplug"]["rollout_step"])
    except READ_ERRORS:
        return 0
