"""``fit``: a training from Python, in a script or a notebook, as ``rlplug fit`` runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, Trainer, seed_everything

from rlplug.cli.configuration.trainer_options import TRAINER_DEFAULTS
from rlplug.cli.lightning_cli import in_order
from rlplug.data.datamodule import PromptDataModule
from rlplug.distributed.checkpoint import RLCheckpoint
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.module import RLModule
from rlplug.observability.metrics_log import read_metrics
from rlplug.observability.outcome import RewardChange, held_out_reward, training_reward
from rlplug.observability.progress import RLProgressBar
from rlplug.observability.start import quieten_libraries
from rlplug.recording.run_folder import RunFolder
from rlplug.recording.run_record import METRICS


@dataclass(frozen=True)
class FitResult:
    """What came of a training."""

    folder: Path
    """Run folder, with ``policy/``, the trained model."""
    training: RewardChange | None
    """Mean reward of the first and of the last steps."""
    held_out: RewardChange | None
    """Mean reward of the first and of the last validation."""

    @property
    def policy(self) -> Path:
        """The trained model, for ``AutoModelForCausalLM.from_pretrained``."""
        return self.folder / "policy"


def fit(
    module: RLModule,
    data: PromptDataModule,
    run_dir: str = "runs/default",
    *,
    accelerator: Literal["auto", "cpu", "gpu"] = "auto",
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
    **trainer_options: Any,
) -> FitResult:
    """Train ``module`` on the prompts of ``data``, with progress in the terminal or the notebook.

    Lightning's ``Trainer`` takes both as well; this gives it the options of the command line.

    Args:
        module: The run: policy, algorithm, rewards and settings.
        data: The prompts.
        run_dir: Parent folder of the run's numbered folder.
        accelerator: Where to train; ``auto`` takes a GPU where there is one.
        seed: Seed of new weights, completions and orders of prompts that have none of their own.
        callbacks: Lightning's; a :class:`RunFolder` or :class:`RLCheckpoint` among them takes the place of the default.
        trainer_options: Others of Lightning's ``Trainer``.

    Raises:
        RLPlugError: The run cannot start, or had to stop; the message says what to change.
    """
    quieten_libraries()
    seed_everything(seed, verbose=False)
    defaults: list[Callback] = [RunFolder(run_dir), RLCheckpoint(), RLProgressBar()]
    options: dict[str, Any] = {**TRAINER_DEFAULTS, "strategy": RLFSDP2Strategy(), "accelerator": accelerator}
    used = [each for each in defaults if not any(isinstance(other, type(each)) for other in callbacks)]
    trainer: Any = Trainer(callbacks=[*used, *callbacks], **(options | trainer_options))
    trainer.callbacks = in_order(trainer.callbacks)
    trainer.fit(module, datamodule=data)
    assert module.run_dir is not None, "there is a folder after setup('fit')"
    rows = read_metrics(module.run_dir / METRICS)
    return FitResult(module.run_dir, training_reward(rows), held_out_reward(rows))
