"""Columns of a ``metrics.csv`` that may still grow: only the rows that are new, and the columns that are asked for."""

from __future__ import annotations

import csv
import io
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]

TAIL_BYTES: Final = 1 << 16
"""Bytes from the end of the file that :meth:`MetricsFile.latest` reads."""
MARK_BYTES: Final = 64
"""Bytes before the end of what was read that must not change while the file grows."""


class MetricsFile:
    """Reader of a ``metrics.csv``; each call looks whether the file has changed.

    A file that only grew is read from where the last read ended; one that was replaced, as at a new metric or a resume,
    is read anew. A last line without its line feed is being written, or torn by a kill: it waits until it is whole.
    Rows whose number of cells differs from that of the header, or that have no step, are left out.

    Args:
        locate: Function that returns the file's path, or ``None`` where there is none: then it has no columns.
    """

    def __init__(self, locate: Callable[[], Path | None]) -> None:
        self._locate = locate
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._names: list[str] = []
        self._header_end = self._end = 0
        self._mark = b""
        self._inode: tuple[int, int] | None = None
        self._loaded: dict[str, Column] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the columns take."""
        return sum(column.nbytes for column in self._loaded.values())

    def has_read(self, name: str) -> bool:
        """Return whether a column is in memory, so that it needs at most the rows that are new."""
        return name in self._loaded

    def drop(self) -> None:
        """Forget the columns, to be read again when they are asked for."""
        with self._lock:
            self._forget()

    def names(self) -> list[str]:
        """Return the names of the columns, in the order of the file."""
        with self._lock, self._opened() as file:
            self._update(file)
            return list(self._names)

    def columns(self, names: Iterable[str]) -> dict[str, Column]:
        """Return columns as float64, a value for each row: NaN for an empty cell, infinity for one that is not finite.

        Args:
            names: Those wanted; ``step`` always comes with them, and those that the file lacks are left out.
        """
        with self._lock, self._opened() as file:
            self._update(file)
            wanted = [name for name in dict.fromkeys(("step", *names)) if name in self._names]
            if missing := [name for name in wanted if name not in self._loaded]:
                self._loaded |= self._parse(_read(file, self._header_end, self._end), missing)
            return {name: self._loaded[name] for name in wanted}

    def latest(self) -> dict[str, float]:
        """Return the last value of each column within the last 64 KiB of the file, which is all that is read of it."""
        with self._lock, self._opened() as file:
            self._update(file, only_header=not self._loaded)
            size = file.seek(0, os.SEEK_END)
            data = _read(file, max(self._header_end, size - TAIL_BYTES), size)
            if size - TAIL_BYTES > self._header_end:
                data = data.partition(b"\n")[2]
            columns = self._parse(data[: data.rfind(b"\n") + 1], self._names)
        finite = {name: column[np.isfinite(column)] for name, column in columns.items()}
        return {name: float(column[-1]) for name, column in finite.items() if len(column)}

    def sampled(self, name: str, count: int) -> tuple[Column, Column]:
        """Return steps and values of about ``count`` rows that are spread over the file, which is not read whole."""
        with self._lock, self._opened() as file:
            self._update(file, only_header=not self._loaded)
            if name not in self._names:
                return np.empty(0), np.empty(0)
            lines: dict[bytes, None] = {}  # each once, in their order
            for begin in np.linspace(self._header_end, file.seek(0, os.SEEK_END), count, dtype=np.int64).tolist():
                file.seek(begin - 1)
                file.readline()  # the rest of the line before
                line = file.readline()
                if line.endswith(b"\n"):
                    lines[line] = None
            columns = self._parse(b"".join(lines), ["step", name])
        known = np.isfinite(columns[name])
        return columns["step"][known], columns[name][known]

    def _opened(self) -> io.BufferedIOBase:
        path = self._locate()
        try:
            return io.BytesIO() if path is None else path.open("rb")
        except OSError:
            return io.BytesIO()

    def _update(self, file: io.BufferedIOBase, only_header: bool = False) -> None:
        """Read the rows that are new, for the columns that are loaded."""
        if isinstance(file, io.BytesIO):
            self._forget()
            return
        stat = os.fstat(file.fileno())
        inode = (stat.st_dev, stat.st_ino)
        mark_at = max(0, self._end - MARK_BYTES)
        if inode != self._inode or stat.st_size < self._end or _read(file, mark_at, self._end) != self._mark:
            self._forget()
            self._inode = inode
            self._read_header(file)
        if only_header or not self._names:
            return
        data = _read(file, self._end, stat.st_size)
        data = data[: data.rfind(b"\n") + 1]
        if data:
            for name, new in self._parse(data, list(self._loaded)).items():
                self._loaded[name] = np.concatenate((self._loaded[name], new))
            self._take_end(file, self._end + len(data))

    def _read_header(self, file: io.BufferedIOBase) -> None:
        file.seek(0)
        line = file.readline()
        if not line.endswith(b"\n"):
            return
        names = next(csv.reader([line.decode("utf-8", errors="replace")]), [])
        if "step" in names and len(set(names)) == len(names):
            self._names, self._header_end = names, len(line)
            self._take_end(file, len(line))

    def _take_end(self, file: io.BufferedIOBase, end: int) -> None:
        self._end = end
        self._mark = _read(file, max(0, end - MARK_BYTES), end)

    def _parse(self, data: bytes, names: Sequence[str]) -> dict[str, Column]:
        """Return columns of whole lines. The same lines are left out whichever columns are asked for."""
        if not names:
            return {}
        step, width = self._names.index("step"), len(self._names)
        indices = [self._names.index(name) for name in names]
        rows = []
        for line in data.splitlines():
            cells = line.split(b",")
            if len(cells) == width and np.isfinite(_number(cells[step])):
                rows.append([_number(cells[index]) for index in indices])
        table = np.array(rows, np.float64).reshape(len(rows), len(names))
        return {name: np.ascontiguousarray(table[:, index]) for index, name in enumerate(names)}


def _number(cell: bytes) -> float:
    """Return the value of a cell: NaN for an empty one, infinity for one that is no finite number."""
    try:
        value = float(cell or b"nan")
    except ValueError:
        return np.inf
    return value if math.isfinite(value) or not cell else np.inf


def _read(file: io.BufferedIOBase, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)
