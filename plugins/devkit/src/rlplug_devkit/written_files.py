"""``WrittenFiles``: the files that this process writes during calls, from Python's audit events."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
EVENTS: Final[dict[str, tuple[tuple[int, int], ...]]] = {
    "open": ((0, -1),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.link": ((1, 3),),
    "os.mkdir": ((0, 2),),
    "os.remove": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.rmdir": ((0, 1),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, -1),),
    "os.utime": ((0, 3),),
    "sqlite3.connect": ((0, -1),),
}
"""Audit events of a change in the file system: places of the path, and of its open folder or -1, in the arguments."""
CACHES: Final = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
"""Environment variables that name a folder in which any library may write."""
CACHE_FOLDERS: Final = frozenset({"__pycache__", ".cache", ".config", ".triton", ".nv"})
"""Names of folders in which any library may write."""
SYSTEM: Final = ("/dev", "/proc", "/sys")
PYTESTS: Final = "pytest-of-"
"""How pytest's folder among the temporary ones begins: there are files of the test, which take a user's place."""


class WrittenFiles:
    """Files that are written between :meth:`begin` and :meth:`end`, by any thread.

    Calls may write temporary files, caches of libraries, and what lies in ``folders``. Only what Python itself opens is
    seen, and nothing of another process.

    Args:
        folders: Files and folders that the plugin's options name for it to write.
    """

    def __init__(self, folders: Sequence[Path | str] = ()) -> None:
        self._allowed = [Path(folder).expanduser().resolve() for folder in folders]
        self._allowed += [Path(os.environ[name]).expanduser().resolve() for name in CACHES if name in os.environ]
        self._forbidden: set[str] = set()
        self._temporary: set[str] = set()
        self._depth = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Look from now on."""
        _hear_events()
        with self._lock:
            self._depth += 1
            _LISTENERS.add(self)

    def end(self) -> None:
        """Look no more, once this was called as often as :meth:`begin`."""
        with self._lock:
            self._depth -= 1
            if not self._depth:
                _LISTENERS.discard(self)

    def pop_forbidden(self) -> list[str]:
        """Return the paths that no call may write, since this was last asked."""
        found, self._forbidden = sorted(self._forbidden), set()
        return found

    def left(self) -> set[str]:
        """Return the temporary files and folders that are still there."""
        return {path for path in list(self._temporary) if os.path.lexists(path)}

    def note(self, path: str) -> None:
        """Note that ``path``, which is absolute, is written."""
        written = Path(path)
        if path.startswith(SYSTEM) or CACHE_FOLDERS.intersection(written.parts):
            return
        if any(written.is_relative_to(folder) for folder in self._allowed):
            return
        temporary = Path(tempfile.gettempdir()).resolve()
        if written == temporary:  # a file without a name
            return
        is_temporary = temporary in written.parents
        is_of_test = is_temporary and written.relative_to(temporary).parts[0].startswith(PYTESTS)
        is_here = temporary in Path.cwd().parents and written.is_relative_to(Path.cwd())
        if is_temporary and not is_of_test and not is_here:
            self._temporary.add(path)
        else:
            self._forbidden.add(path)


_LISTENERS: Final[set[WrittenFiles]] = set()
_IS_HEARD: Final[list[bool]] = []


def _hear_events() -> None:
    if not _IS_HEARD:
        _IS_HEARD.append(True)
        sys.addaudithook(_hear)  # for as long as the process lasts: none can be removed


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if not _LISTENERS or event not in EVENTS:
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITES):
        return
    for place, folder in EVENTS[event]:
        path = arguments[place]
        if isinstance(path, str | bytes | os.PathLike) and path not in ("", ":memory:", b""):
            opened = arguments[folder] if 0 <= folder < len(arguments) else -1
            inside = f"/proc/self/fd/{opened}" if isinstance(opened, int) and opened >= 0 else ""
            absolute = os.path.realpath(os.path.join(inside, os.fsdecode(path)))
            for listener in list(_LISTENERS):
                listener.note(absolute)
