"""Sources of prompts as ``--data`` names them: the run's own, files, and classes with their options."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rlplug.data.datamodule import PromptDataModule
from rlplug.data.record_files import READERS
from rlplug.errors import ConfigError
from rlplug_eval.policies import split_name

OWN: Final = ("val", "train")
"""Names of the sources of the configuration."""


def named_source(argument: str) -> dict[str, str]:
    """Return the name of a source and its argument: ``NAME=SOURCE``, or a name from the file's."""
    name, place = (None, argument) if argument.startswith("{") else split_name(argument)
    if name is None and place.startswith("{"):
        name = "data"
    return {"name": name or Path(place).stem, "argument": place}


def require_source(argument: str, data: PromptDataModule) -> None:
    """Refuse a source that is not there.

    Args:
        argument: A name in ``OWN``, a file, or a class with its options, which is not looked at.
        data: The configuration's.

    Raises:
        ConfigError: The file does not exist, or the configuration has no held-out prompts.
    """
    if argument == "val" and data.val is None:
        raise ConfigError("--data val: the configuration has no data.val; give --data train, or a file of prompts.")
    if argument in OWN or argument.startswith("{"):
        return
    path = Path(argument).expanduser()
    if path.suffix.lower() not in READERS or not path.is_file():
        raise ConfigError(
            f"--data {argument}: no file of prompts has that name ({', '.join(READERS)}). Give such a file, "
            f"{' or '.join(OWN)}, or {{class_path: ..., init_args: ...}}."
        )
