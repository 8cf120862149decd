"""Checkpoints of RL steps: atomic, bounded in number, and exact to resume from."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any, Final

from lightning.pytorch import Callback, Trainer
from torch.distributed.checkpoint.api import CheckpointException

from rlplug.distributed.checkpoints.files import FOLDER, list_checkpoints
from rlplug.distributed.durable_files import explained, reason, sync
from rlplug.errors import RunError
from rlplug.types.ranges import Count, Steps, check_ranges

MYPY = False  # in place of TYPE_CHECKING, whose imports jsonargparse carries out
if MYPY:
    from lightning.pytorch import LightningModule

    from rlplug.distributed.checkpoints.background_writer import BackgroundWriter

WRITE_ERRORS: Final = (OSError, RuntimeError, CheckpointException)


class RLCheckpoint(Callback):
    """Callback that saves weights, optimizer, scheduler, random generators, prompt position and policy version.

    A checkpoint is written beside its final name and renamed when it is complete, and only then are older ones
    removed: a save that is killed, or finds the disk full, leaves the previous checkpoint intact.

    Args:
        every_n_steps: RL steps between two saves; a run also saves at its end and on Ctrl-C.
        keep: Number of newest checkpoints to keep.
        asynchronous: Copy to host memory, which takes as much of it as the checkpoint does, and write to the disk while
            training continues. At most one write runs at a time: the next save waits for it. The last save of a run is
            written before the run ends.
    """

    def __init__(self, every_n_steps: Steps = 50, keep: Count = 2, asynchronous: bool = False) -> None:
        self.every_n_steps = every_n_steps
        self.keep = keep
        check_ranges(self, "checkpoint")
        self.asynchronous = asynchronous
        self._writer: BackgroundWriter | None = None
        self._unpublished: Path | None = None
        """Final folder of the checkpoint that is written in the background, on every rank; ``None`` if none is."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.asynchronous:
            from rlplug.distributed.checkpoints.background_writer import BackgroundWriter

            strategy: Any = trainer.strategy
            self._writer = BackgroundWriter(strategy.root_device, strategy.waiting_time)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module: Any = pl_module
        is_due = trainer.should_stop or module.rollout_step % self.every_n_steps == 0
        if is_due or self._background_is_done(trainer):
            with module.timer.phase("checkpoint"):
                self._finish_background(trainer)
                if is_due:
                    self._save(trainer, module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish_background(trainer)
        if self._writer is not None:
            self._writer.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Complete the checkpoint that is being written. Not collective: other ranks may be anywhere."""
        if self._unpublished is None:
            return
        assert self._writer is not None
        final, self._unpublished = self._unpublished, None
        try:
            self._writer.wait()
            self._publish(trainer, final)
        except WRITE_ERRORS as error:  # the run has failed for another reason, which is the one to report
            _say(trainer, write_failure(final, final.parent.parent, error))

    def _save(self, trainer: Trainer, module: Any) -> None:
        """Write the checkpoint of this step, or begin to, unless it exists; ``RunError`` where it fails. Collective."""
        assert module.run_dir is not None
        final: Path = module.run_dir / FOLDER / f"step-{module.rollout_step:08d}"
        if trainer.strategy.broadcast(final.exists()):
            return
        in_background = self._writer is not None and not trainer.should_stop
        try:
            if trainer.is_global_zero:
                shutil.rmtree(_partial(final), ignore_errors=True)
                final.parent.mkdir(parents=True, exist_ok=True)
            trainer.strategy.barrier()
            trainer.save_checkpoint(
                _partial(final), weights_only=False, storage_options=self._writer if in_background else None
            )
        except WRITE_ERRORS as error:
            shutil.rmtree(_partial(final), ignore_errors=True)
            raise RunError(write_failure(final, final.parent.parent, error)) from error
        if in_background:
            self._unpublished = final
            return
        trainer.strategy.barrier()
        self._publish(trainer, final)
        trainer.strategy.barrier()

    def _background_is_done(self, trainer: Trainer) -> bool:
        """Return whether the write has ended as rank 0 sees it, the same on every rank."""
        if self._unpublished is None:
            return False
        assert self._writer is not None
        is_done: bool = trainer.strategy.broadcast(self._writer.is_done)
        return is_done

    def _finish_background(self, trainer: Trainer) -> None:
        """Wait for the checkpoint that is being written, and rename it; ``RunError`` where it failed. Collective."""
        if self._unpublished is None:
            return
        assert self._writer is not None
        final, self._unpublished = self._unpublished, None
        try:
            seconds = self._writer.wait()
        except WRITE_ERRORS as error:
            shutil.rmtree(_partial(final), ignore_errors=True)
            raise RunError(write_failure(final, final.parent.parent, error)) from error
        self._publish(trainer, final)
        trainer.strategy.barrier()
        _say(trainer, f"checkpoint {final.name} was written in the background, {seconds:.1f} s after its step")

    def _publish(self, trainer: Trainer, final: Path) -> None:
        """Rename a complete checkpoint to its final name; remove the oldest ones and the remains of killed saves."""
        if not trainer.is_global_zero:
            return
        with explained(final):
            sync(_partial(final))
            _partial(final).replace(final)
            sync(final.parent)
        try:
            for old in list_checkpoints(final.parent.parent)[: -self.keep]:
                old.replace(_partial(old))  # so that nobody takes what a kill leaves of it for a checkpoint
            for partial in final.parent.glob("step-*.partial"):
                shutil.rmtree(partial)
        except OSError as error:
            _say(trainer, f"old checkpoints in {final.parent} could not be removed: {reason(error)}")


def _partial(final: Path) -> Path:
    """Return the folder of a checkpoint while it is written."""
    return final.with_suffix(".partial")


def _say(trainer: Trainer, message: str) -> None:
    if trainer.is_global_zero:
        print(message, file=sys.stderr, flush=True)


def write_failure(path: Path, run_dir: Path, error: BaseException) -> str:
    """Return a message about a checkpoint of a run that could not be written to ``path``: why, and how to go on."""
    left = list_checkpoints(run_dir)
    free = shutil.disk_usage(run_dir).free / (1 << 30)
    resume = f"The previous checkpoint {left[-1].name} is complete" if left else "There is no previous checkpoint"
    return (
        f"checkpoint {path} could not be written: {reason(error)} ({free:.1f} GiB are free). {resume}; free some "
        f"space, then continue with: rlplug fit --resume {run_dir}"
    )
