"""Files that a run writes into its folder, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rlplug.errors import ConfigError

METRICS: Final = "metrics.jsonl"
SAMPLES: Final = "samples.jsonl"
REWARD_ERRORS: Final = "reward_errors.jsonl"


def require_no_file(folder: Path, key: str) -> None:
    """Refuse a folder whose place, or that of a parent, a file takes.

    Args:
        folder: The folder, which may not exist yet.
        key: Key or option that names it.

    Raises:
        ConfigError: The message names the file.
    """
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ConfigError(f"{key} is {str(folder)!r}, and {place} is a file: give a folder.")
