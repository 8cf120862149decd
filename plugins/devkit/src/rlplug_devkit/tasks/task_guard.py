"""``TaskGuard``: the guard of calls of rewards, environments and sources, which also sees the files that they leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
