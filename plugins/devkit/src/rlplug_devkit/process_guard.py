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
        kept: Folders in which no file may be written, such as a model's, besides the working folder.
        free: Folders in which files may be written, besides the system's of temporary files and caches; of two folders
            that contain each other the inner one counts.
        only_kept: Whether files may be written everywhere else.
    """

    def __init__(self, kept: Sequence[Path] = (), free: Sequence[Path] = (), only_kept: bool = False) -> None:
        self._kept = [os.path.realpath(folder) for folder in kept]
        free_folders = ["/"] if only_kept else [*_free_folders(), *map(str, free)]
        self._free = [os.path.realpath(folder) for folder in free_folders]
        self._working = [] if only_kept else [os.path.realpath(os.getcwd())]
        self._files: set[str] = set()
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
        kept, free = (_innermost(name, folders) for folders in ([*self._kept, *self._working], self._free))
        if (kept >= free or free == 0) and "__pycache__" not in name:
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


def _innermost(name: str, folders: Sequence[str]) -> int:
    """Return the length of the longest of those folders that a file lies in, or 0."""
    return max((len(each) for each in folders if name == each or name.startswith(each.rstrip("/") + "/")), default=0)
