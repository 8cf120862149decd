"""Whether a run goes on: ``run.json`` of one that was killed cannot say it, and the lock of its folder does."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlplug.distributed.durable_files import own_file

LOCK_FILE: Final = "run.lock"
NOT_ENDED: Final = ("unfinished", "running")
"""Statuses in ``run.json`` of a run that has written no end; the second is of older runs."""


def with_state(info: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Return the contents of a run's ``run.json`` with a status that is true now.

    A run that has written no end is ``running`` while a process holds the lock of its folder, and ``killed`` when none
    does. Where that cannot be known, its status stays as it is.

    Args:
        info: Contents of ``run.json``.
        folder: Folder of the run.
    """
    if info.get("status") not in NOT_ENDED or (goes_on := is_locked(folder / LOCK_FILE)) is None:
        return info
    if goes_on:
        return {**info, "status": "running"}
    return {**info, "status": "killed", "message": "The process of the run has ended without saying why."}


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds the lock of a run's folder; ``None`` where that cannot be known.

    ``F_GETLK`` asks and takes nothing, so that a run that starts now is not refused. It works for runs on other hosts
    as the lock does: not on file systems without locks.
    """
    if sys.platform != "linux":
        return None
    try:
        descriptor = own_file(str(path), os.O_RDONLY)
    except OSError:
        return None
    try:
        question = struct.pack("hhqqi0q", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, question)
    except OSError:  # such as of a file system without locks
        return None
    finally:
        os.close(descriptor)
    kind: int = struct.unpack_from("h", answer)[0]
    return kind != fcntl.F_UNLCK
