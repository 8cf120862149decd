"""The record in a checkpoint of the trainer whose networks it holds: another has other parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlplug.distributed.checkpoint_files import run_dir_of
from rlplug.errors import ConfigError
from rlplug.interfaces.trainer import ModelTrainer
from rlplug.models.transformers_trainer import TransformersTrainer


def check_trainer_record(trainer: ModelTrainer, folder: Path, state: Mapping[str, Any]) -> None:
    """Refuse the checkpoint of another trainer.

    Args:
        trainer: The trainer of this run.
        folder: The checkpoint, for the message.
        state: What the checkpoint holds besides tensors. One without a record is of the default trainer.

    Raises:
        ConfigError: The checkpoint is of another trainer; the message names both, and how to go on.
    """
    own, default = type(trainer).__name__, TransformersTrainer.__name__
    saved = state["rlplug"].get("trainer", default)
    if saved == own:
        return
    run_dir = run_dir_of(folder)
    policy = "the policy folder of its run" if run_dir is None else run_dir / "policy"
    raise ConfigError(
        f"model.trainer is {own}, and checkpoint {folder} was written with {saved}, whose parameters have other names "
        f"and forms. Resume with {'null, the default' if saved == default else saved}, or export the policy, which a "
        f"run does at its end, and start a new run with {own} from that folder: model.policy.path {policy}, "
        "model.policy.init pretrained."
    )
