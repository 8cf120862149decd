"""``rlplug fit`` and ``rlplug validate``."""

from __future__ import annotations

from typing import Final

from rlplug.cli.lightning_cli import run_lightning

TAKES_CONFIGURATION: Final = True


def fit_command(arguments: list[str]) -> int:
    """Train: -c CONFIG, or --resume RUN to go on with one."""
    return run_lightning(["fit", *arguments])


def validate_command(arguments: list[str]) -> int:
    """Score held-out prompts once: -c CONFIG --ckpt_path CHECKPOINT."""
    return run_lightning(["validate", *arguments])
