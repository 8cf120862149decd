"""Options of Lightning's trainer: which the RL loop honours, and which it refuses, with what to write instead."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

from jsonargparse import Namespace

from rlplug.distributed.durable_files import require_no_file
from rlplug.errors import ConfigError, shorten

TRAINER_DEFAULTS: Final[Mapping[str, Any]] = {
    "strategy": {"class_path": "rlplug.distributed.strategy.RLFSDP2Strategy"},
    "accelerator": "auto",
    "devices": 1,
    "max_epochs": -1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}
"""Options that differ from Lightning's own defaults."""

HONOURED: Final = (
    *("accelerator", "benchmark", "callbacks", "detect_anomaly", "deterministic", "devices", "enable_autolog_hparams"),
    *("enable_progress_bar", "inference_mode", "logger", "max_time", "num_nodes", "plugins"),
)
"""Options that do what Lightning's documentation says."""

_TEXTS: Final = json.loads(resources.files("rlplug.cli.configuration").joinpath("refused_options.json").read_text())
REFUSED: Final[Mapping[str, str]] = _TEXTS["trainer"]
"""Options that the loop does not honour, and what to do instead."""
REFUSED_CALLBACKS: Final[Mapping[str, str]] = _TEXTS["callbacks"]
"""Callbacks of Lightning that the loop cannot serve, and why or what to do instead."""
REFUSED_CHECKPOINT_ARGUMENTS: Final[Mapping[str, str]] = _TEXTS["ModelCheckpoint"]
"""Arguments of ``ModelCheckpoint`` that have no meaning here."""


def check_trainer_options(trainer: Namespace, defaults: Mapping[str, Any]) -> None:
    """Refuse options of the trainer that the RL loop would ignore.

    Args:
        trainer: The resolved options.
        defaults: The default of each.

    Raises:
        ConfigError: The message names the key, the value and what to write instead.
    """
    for name, value in vars(trainer).items():
        default = defaults.get(name)
        asks_nothing = (value is False and default is None) or (name == "strategy" and isinstance(value, Namespace))
        if name in REFUSED and value != default and not asks_nothing:
            raise ConfigError(
                f"trainer.{name} is {shorten(value)}, which the RL loop does not follow: {REFUSED[name]}."
            )
    max_time = trainer.get("max_time")
    if max_time is not None and not re.search("[1-9]", str(max_time)):
        raise ConfigError(f"trainer.max_time is {shorten(max_time)}, no time: write DD:HH:MM:SS, as 00:02:00:00.")
    for name in ("callbacks", "logger"):
        given = trainer.get(name)
        for index, part in enumerate(given if isinstance(given, list) else [given]):
            if isinstance(part, Namespace):
                _check_part(f"trainer.{name}[{index}]", part)


def _check_part(key: str, part: Any) -> None:
    name, options = str(part.class_path).rpartition(".")[2], part.get("init_args") or {}
    if reason := REFUSED_CALLBACKS.get(name):
        raise ConfigError(f"{key} is {name}, which does not work with the RL loop: {reason}. Remove it.")
    if name == "ModelCheckpoint":
        for argument, reason in REFUSED_CHECKPOINT_ARGUMENTS.items():
            if (value := options.get(argument)) not in (None, False):
                raise ConfigError(f"{key}: ModelCheckpoint's {argument} is {shorten(value)}: {reason}.")
    for argument in ("dirpath", "save_dir"):
        if isinstance(folder := options.get(argument), str):
            require_no_file(Path(folder), f"{key}.init_args.{argument}")
