"""A guard around calls of a plugin: what they change of the process, and which files they write where."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rlplug_devkit.process_state import changes_since, generator_states, moved, process_state

WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NUM_PATHS: Final = {
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.rename": 2,
    "os.chmod": 1,
    "os.chown": 1,
    "os.link": 2,
    "os.symlink": 2,
    "os.truncate": 1,
    "os.utime": 1,
}
"""Audit events of calls that change files, each with the number of paths that it begins with."""
CACHES: Final = ("XDG_CACHE_HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
"""Environment variables that name folders of caches."""
FILES: Final = "files"
"""Name of written files among the changes."""

_guards: list[ProcessGuard] = []
"""Guards whose calls run now. Python's audit hooks stay for good, so one serves all."""
_is_hooked = False


class ProcessGuard:
    """What calls of a plugin changed that they share with the trainer and with the machine.

    Args:
        kept: Folders in which no file may be written, such as a model's.
        only_kept: Whether files elsewhere may be written. Where not, the system's folder of temporary files and caches
            remain.
    """

    def __init__(self, kept: Sequence[Path] = (), only_kept: bool = False) -> None:
        self._kept = [os.path.realpath(folder) for folder in kept]
        self._free = [os.path.realpath(folder) for folder in _free_folders()] if not only_kept else ["/"]
        self.changes: dict[str, str] = {}
        """What was changed, by its name: the call, and how. The first change of each counts."""
        self.generators: set[str] = set()
        """Names of the global random generators that were moved."""

    @contextmanager
    def around(self, call: str) -> Iterator[None]:
        """Note what the body changes, as done by ``call``."""
        _hook_once()
        generators, state, files = generator_states(), process_state(), set[str]()
        self._files = files
        _guards.append(self)
        try:
            yield
        finally:
            _guards.remove(self)
            self.generators |= moved(generators)
            written = {FILES: ", ".join(sorted(files)[:3])} if files else {}
            for name, change in (changes_since(state) | written).items():
                self.changes.setdefault(name, f"{call} changed {name}: {change}")

    def note(self, path: Any) -> None:
        """Keep a path that is written to, if it must not be."""
        if not isinstance(path, str | bytes | os.PathLike):
            return  # an open file's number
        name = os.path.realpath(os.fsdecode(path))
        is_kept = any(_lies_in(name, folder) for folder in self._kept)
        is_free = any(_lies_in(name, folder) for folder in self._free) or "__pycache__" in name
        if is_kept or not is_free:
            self._files.add(name)


def _hook_once() -> None:
    global _is_hooked
    if not _is_hooked:
        sys.addaudithook(_audit)
        _is_hooked = True


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _guards:
        return
    if event == "open":
        path, mode, flags = arguments
        is_written = bool(flags & WRITES) if isinstance(flags, int) else any(c in (mode or "") for c in "wax+")
        paths: Sequence[Any] = (path,) if is_written else ()
    else:
        paths = arguments[: NUM_PATHS.get(event, 0)]
    for path in paths:
        for guard in tuple(_guards):
            guard.note(path)


def _free_folders() -> list[str]:
    named = [os.environ[name] for name in CACHES if os.environ.get(name)]
    return [tempfile.gettempdir(), "/dev", "/proc", os.path.expanduser("~/.cache"), *named]


def _lies_in(name: str, folder: str) -> bool:
    return name == folder or name.startswith(folder.rstrip("/") + "/")
