"""What calls of rewards, environments and sources change: of the process, of files, and for a moment only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlplug_devkit.process_guard import ProcessGuard
from rlplug_devkit.written_files import WrittenFiles


class TaskGuard(ProcessGuard):
    """A guard that looks at written files by the rules of :class:`~rlplug_devkit.written_files.WrittenFiles`.

    Args:
        files: Files that calls may write, and those that they have written.
    """

    def __init__(self, files: WrittenFiles) -> None:
        super().__init__(only_kept=True)
        self.files = files

    @contextmanager
    def around(self, call: str) -> Iterator[None]:
        """Note what the body changes, as done by ``call``; also where it raises."""
        self.files.begin()
        try:
            with super().around(call):
                yield
        finally:
            self.files.end()
            for path in self.files.pop_forbidden():
                self.changes.setdefault(f"file {path}", f"{call} wrote, changed or removed {path}")


@contextmanager
def replacements(found: set[str] | None) -> Iterator[None]:
    """Note what the calling thread replaces for a while of what the process has once, in ``found``."""
    if found is None:
        yield
        return
    before, profiler = _had_once(), sys.getprofile()

    def look(*_: Any) -> None:
        found.update(name for name, present in _had_once().items() if present != before[name])

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(profiler)


def _had_once() -> dict[str, Any]:
    return {"sys.stdout": id(sys.stdout), "sys.stderr": id(sys.stderr), "the working folder": os.getcwd()}
