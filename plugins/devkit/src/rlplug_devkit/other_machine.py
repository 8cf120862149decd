"""What differs on another machine: the order and the times of files, and the encoding of text without one."""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
from typing import Any, Final

ENCODING: Final = "latin-1"
"""What text is read and written in there by default: it takes any bytes, and other characters than ASCII differ."""
_TIMES: Final = ("st_atime", "st_mtime", "st_ctime")


def imitate() -> None:
    """Let this process list folders backwards, find new files older than old ones, and have another locale."""
    _list_backwards()
    _turn_times()
    _read_in_another_encoding()


def _list_backwards() -> None:
    listdir, scandir = os.listdir, os.scandir

    class Backwards(contextlib.ExitStack):
        """What ``os.scandir`` returns: an iterator that is closed."""

        def __init__(self, path: Any) -> None:
            super().__init__()
            self._entries = iter([*self.enter_context(scandir(path))][::-1])

        def __iter__(self) -> Any:
            return self._entries

        def __next__(self) -> Any:
            return next(self._entries)

    os.listdir = lambda path=".": listdir(path)[::-1]  # type: ignore[assignment]
    os.scandir = lambda path=".": Backwards(path)  # type: ignore[assignment]


def _turn_times() -> None:
    stat = os.stat

    @functools.wraps(stat)
    def turned(*arguments: Any, **options: Any) -> os.stat_result:
        found = stat(*arguments, **options)
        fields = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
        for name in _TIMES:
            fields[f"{name}_ns"] = 10**18 - fields[f"{name}_ns"] // 2
            fields[name] = fields[f"{name}_ns"] / 1e9
        numbers = [*found[:7], *(int(fields[name]) for name in _TIMES)]
        return os.stat_result(numbers, fields)

    for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        able |= {turned} if stat in able else set()  # shutil asks for the function itself
    os.stat = turned


def _read_in_another_encoding() -> None:
    original = io.open

    @functools.wraps(original)
    def opened(
        file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, *rest: Any, **more: Any
    ) -> Any:
        is_default = "b" not in mode and encoding in (None, "locale")
        return original(file, mode, buffering, ENCODING if is_default else encoding, *rest, **more)

    builtins.open = io.open = opened
