"""Checkpoints of RL steps: atomic, bounded in number, and exact to resume from."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning.pytorch import Callback, Trainer
from torch.distributed.checkpoint.api import CheckpointException

from rlplug.errors import ConfigError, RunError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

FOLDER: Final = "checkpoints"
_NAME: Final = re.compile(r"step-(\d{8})")


class RLCheckpoint(Callback):
    """Saves weights, optimizer, scheduler, random generators, prompt position and policy version.

    A checkpoint is written beside its final name and renamed when it is complete, and only then are older ones
    removed: a save that is killed or finds the disk full leaves the former checkpoint as it was.

    Args:
        every_n_steps: Save after every so many RL steps, besides the end of the run and Ctrl-C.
        keep: Newest checkpoints to keep.
    """

    def __init__(self, every_n_steps: int = 50, keep: int = 2) -> None:
        if every_n_steps < 1 or keep < 1:
            raise ConfigError(
                f"checkpoint.every_n_steps is {every_n_steps} and checkpoint.keep {keep}: give at least 1 for each."
            )
        self.every_n_steps = every_n_steps
        self.keep = keep

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module: Any = pl_module
        if trainer.should_stop or module.rollout_step % self.every_n_steps == 0:
            with module.clock.phase("checkpoint"):
                self.save(trainer, module)

    def save(self, trainer: Trainer, module: Any) -> Path:
        """Write the checkpoint of ``module.rollout_step`` unless it is there, and return its folder. Collective.

        Raises:
            RunError: Writing failed. The former checkpoints are whole.
        """
        assert module.run_dir is not None
        folder: Path = module.run_dir / FOLDER
        final = folder / f"step-{module.rollout_step:08d}"
        partial = final.with_suffix(".partial")
        if trainer.strategy.broadcast(final.exists()):
            return final
        try:
            if trainer.is_global_zero:
                shutil.rmtree(partial, ignore_errors=True)
                folder.mkdir(parents=True, exist_ok=True)
            trainer.strategy.barrier()
            trainer.save_checkpoint(partial, weights_only=False)
        except (OSError, RuntimeError, CheckpointException) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise RunError(_failure(folder, final, error)) from error
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            os.replace(partial, final)
            for old in list_checkpoints(module.run_dir)[: -self.keep]:
                shutil.rmtree(old)
        trainer.strategy.barrier()
        return final


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    return sorted(path for path in (run_dir / FOLDER).glob("step-*") if _NAME.fullmatch(path.name))


def newest_checkpoint(run_dir: Path) -> Path:
    """Return the newest complete checkpoint of a run.

    Raises:
        ConfigError: The folder is not a run, or the run ended before its first checkpoint.
    """
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"--resume {run_dir}: this is not the folder of a run (it has no config.yaml).")
    if not (found := list_checkpoints(run_dir)):
        raise ConfigError(
            f"--resume {run_dir}: the run has no checkpoint yet. Start it anew, and lower checkpoint.every_n_steps."
        )
    return found[-1]


def run_dir_of(checkpoint: str | Path) -> Path | None:
    """Return the run folder that a checkpoint lies in, or None when it lies elsewhere."""
    path = Path(checkpoint)
    is_ours = _NAME.fullmatch(path.name) and path.parent.name == FOLDER
    return path.parent.parent if is_ours else None


def _failure(folder: Path, final: Path, error: BaseException) -> str:
    left = list_checkpoints(folder.parent)
    reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    free = shutil.disk_usage(folder.parent).free / (1 << 30)
    resume = f"The former checkpoint {left[-1].name} is whole" if left else "There is no former checkpoint"
    return (
        f"checkpoint {final} could not be written: {reason} ({free:.1f} GiB are free). {resume}; make room, then go "
        f"on with: rlplug fit --resume {folder.parent}"
    )
