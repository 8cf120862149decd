"""``--resume``: which checkpoint a run goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml
from lightning.pytorch.utilities import rank_zero_only

from rlplug.cli.command_parser import take_option
from rlplug.distributed.checkpoints.files import CONFIG, MANIFEST, list_checkpoints, run_dir_of
from rlplug.distributed.checkpoints.reader import NEWEST_WHOLE, newest_checkpoint, newest_whole
from rlplug.distributed.durable_files import own_bytes, reason
from rlplug.errors import ConfigError

_BLOCKS: Final = ("trainer", "model", "data", "run", "checkpoint")  # every run writes them


def with_resume(arguments: list[str]) -> list[str]:
    """Replace ``--resume RUN`` by the run's own configuration and a checkpoint; later options still override.

    The checkpoint is the newest one, or, with ``--ckpt_path newest-whole``, the newest that is not damaged.

    Raises:
        ConfigError: ``RUN`` is not a run that can be resumed.
    """
    arguments, runs = take_option(arguments, "--resume")
    if not runs:
        if NEWEST_WHOLE in take_option(arguments, "--ckpt_path")[1]:
            raise ConfigError(f"--ckpt_path {NEWEST_WHOLE} is a checkpoint of a run: name the run with --resume RUN.")
        return arguments
    if len(runs) > 1 or not runs[0] or runs[0].startswith("-"):
        raise ConfigError("--resume needs the folder of one run, such as runs/quickstart/001.")
    run_dir = Path(runs[0])
    rest, checkpoints = take_option(arguments[1:], "--ckpt_path")
    chosen = checkpoints[-1] if checkpoints else str(newest_checkpoint(run_dir))
    if chosen == NEWEST_WHOLE:
        chosen = str(_newest_whole(run_dir))
    read_config(run_dir / CONFIG)
    return [arguments[0], "--config", str(run_dir / CONFIG), "--ckpt_path", chosen, *rest]


def _newest_whole(run_dir: Path) -> Path:
    newest = newest_checkpoint(run_dir)
    if getattr(rank_zero_only, "rank", 0) != 0:
        return newest  # the strategy takes rank 0's, which need not be verified by each rank
    if (whole := newest_whole(run_dir)) is None:
        raise ConfigError(f"--resume {run_dir}: each of its checkpoints is damaged, and none can be resumed.")
    return whole


def read_config(path: Path) -> dict[str, Any]:
    """Return a configuration that a run has written.

    Raises:
        ConfigError: The file is absent or damaged; the message says where there may be another copy.
    """
    problem = "it holds no configuration"
    try:
        found = yaml.safe_load(own_bytes(path))
        if isinstance(found, dict) and found:
            if not (missing := [block for block in _BLOCKS if block not in found]):
                return found
            problem = f"it is not whole, and lacks {' and '.join(missing)}"
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problem = reason(error)
    copies = [folder / CONFIG for folder in list_checkpoints(path.parent) if (folder / CONFIG).is_file()]
    advice = f" Its checkpoint has a copy: cp {copies[-1]} {path}" if copies else ""
    raise ConfigError(f"{path} cannot be read: {problem}.{advice}")


def check_checkpoint(path: str) -> None:
    """Raise ``ConfigError`` for a ``--ckpt_path`` that is no checkpoint; its reader sees whether it is whole."""
    try:
        if (Path(path) / MANIFEST).exists() or (run_dir_of(path) and Path(path).exists()):
            return
        problem = "is not a checkpoint of rlplug, a folder with manifest.json" if Path(path).exists() else "is absent"
    except OSError as error:
        problem = f"cannot be read: {reason(error)}"
    raise ConfigError(f"--ckpt_path {path} {problem}. Name one, such as runs/quickstart/001/checkpoints/step-00000050.")


def config_of(checkpoint: str | Path) -> dict[str, Any]:
    """Return a checkpoint's configuration, which a run from Python lacks; ``ConfigError`` where it is damaged."""
    path = Path(checkpoint) / CONFIG
    return read_config(path) if path.exists() else {}  # if it was lost, verifying finds that
