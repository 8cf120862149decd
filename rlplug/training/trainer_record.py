"""Records in a checkpoint of what it needs and does not hold: the trainer of its networks, the base of its adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlplug.distributed.checkpoints.files import run_dir_of
from rlplug.distributed.mesh import local_part
from rlplug.errors import ConfigError
from rlplug.interfaces.trainer import ModelTrainer
from rlplug.models.transformers_trainer import TransformersTrainer


def check_records(
    trainer: ModelTrainer, adapters: Mapping[str, float] | None, folder: Path, state: Mapping[str, Any]
) -> None:
    """Refuse a checkpoint of another trainer or base model; see the two functions for arguments and errors."""
    check_trainer_record(trainer, folder, state)
    check_adapter_record(adapters, folder, state)


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


@torch.no_grad()
def adapter_record(network: nn.Module, gather: Callable[[list[float]], list[float]]) -> dict[str, float] | None:
    """Return what tells a network under adapters from others; ``None`` if all of it trains. Collective.

    Returns:
        ``trained``, the number of parameters of the adapters, and of the frozen weights, which no checkpoint holds,
        ``mean`` and ``mean_size``, that of absolute values.
    """
    weights = list(network.parameters())
    frozen = [local_part(weight) for weight in weights if not weight.requires_grad]
    if not frozen:
        return None
    total = sum(float(weight.double().sum()) for weight in frozen)
    size = sum(float(weight.double().abs().sum()) for weight in frozen)
    everyone = gather([total, size, float(sum(weight.numel() for weight in frozen))])
    total, size, number = (sum(everyone[start::3]) for start in range(3))
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    return {"trained": trained, "mean": total / number, "mean_size": size / number}


def check_adapter_record(record: Mapping[str, float] | None, folder: Path, state: Mapping[str, Any]) -> None:
    """Refuse the adapters of other modules or of another base model.

    Args:
        record: :func:`adapter_record` of this run's policy.
        folder: The checkpoint, for the message.
        state: What the checkpoint holds besides tensors.

    Raises:
        ConfigError: Only one of the two has adapters, or their number of parameters or their base differs.
    """
    saved = state["rlplug"].get("adapters")
    if (record is None) != (saved is None):
        trained = "all of the policy" if saved is None else "adapters alone (model.lora)"
        raise ConfigError(
            f"checkpoint {folder} is of a run that trained {trained}, and this one does not. Resume with the run's own "
            "model.lora, or start a new run from its policy folder."
        )
    if record is None:
        return
    if record["trained"] != saved["trained"]:
        raise ConfigError(
            f"checkpoint {folder} has adapters of {saved['trained']:,} parameters, and model.lora makes "
            f"{record['trained']:,}: resume with the rank and targets with which the run began."
        )
    if any(abs(record[name] - saved[name]) > 1e-7 * saved["mean_size"] for name in ("mean", "mean_size")):
        raise ConfigError(
            f"checkpoint {folder} holds adapters of another base model: its weights have mean {saved['mean']:.9g} and "
            f"mean size {saved['mean_size']:.9g}, those of this run {record['mean']:.9g} and "
            f"{record['mean_size']:.9g}. Give model.policy the folder and dtype with which the run began."
        )
