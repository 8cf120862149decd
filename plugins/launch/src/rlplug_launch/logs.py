"""Logs of the tasks, shown on the terminal line by line."""

from __future__ import annotations

from pathlib import Path
from typing import Final

LINE_BYTES: Final = 1 << 14
"""Longest line that waits for its end."""


class LogReader:
    """Reads what a task appends to its log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def new_lines(self, is_last: bool = False) -> list[str]:
        """Return the lines that were completed since the last call.

        Args:
            is_last: Return an unfinished line too.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                read = file.read()
        except OSError:  # it is not there yet
            return []
        self._offset += len(read)
        *lines, self._rest = (self._rest + read).split(b"\n")
        if self._rest and (is_last or len(self._rest) > LINE_BYTES):
            lines.append(self._rest)
            self._rest = b""
        # of a line that a progress bar wrote again and again, the last version
        return [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in lines]
