"""Columns of a ``metrics.jsonl`` that may still grow: each call reads only the lines that are new."""

from __future__ import annotations

import io
import json
import math
import os
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplug_watch.own_files import MAX_LINE_BYTES

Column = NDArray[np.float64]

TAIL_BYTES: Final = 1 << 18
"""Bytes from the end of the file that :meth:`MetricsFile.latest` reads of metrics that most lines have."""
BLOCK_BYTES: Final = 4 << 20
MARK_BYTES: Final = 64
"""Bytes before the end of what was read that must not change while the file grows."""
DECODER: Final = msgspec.json.Decoder(dict[str, float | str | None])
MAX_COLUMNS: Final = 2000
"""Largest number of metrics: those that a longer file has besides are left out."""


class MetricsFile:
    """Reader of a ``metrics.jsonl``; each call looks whether the file has changed.

    A file that only grew is read from where the last read ended; one that was replaced, as at a resume, is read anew. A
    last line without its line feed is being written, or torn by a kill: it waits until it is whole. Lines that are no
    object, or have no step, are left out.

    Args:
        locate: Function that returns the file's path, or ``None`` where there is none: then it has no columns.
    """

    def __init__(self, locate: Callable[[], Path | None]) -> None:
        self._locate = locate
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._columns = {"step": array("d")}
        """Values of each metric up to its last one, NaN in lines that lack it."""
        self._end = 0
        self._mark = b""
        self._inode: tuple[int, int] | None = None
        self._searched: dict[str, tuple[tuple[int, int], int, float | None]] = {}
        """How far the file, by its inode, was searched for a metric's last value, and that value."""
        self.num_damaged = 0
        """Lines that were left out."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the columns take."""
        return sum(len(column) * column.itemsize for column in self._columns.values())

    @property
    def is_read(self) -> bool:
        """Whether columns are in memory, so that they need at most the lines that are new."""
        return self._end > 0

    def drop(self) -> None:
        """Forget the columns, to be read again when they are asked for."""
        with self._lock:
            self._forget()

    def names(self) -> list[str]:
        """Return ``step`` and the names of the metrics, sorted; nothing of a file without lines."""
        with self._lock:
            self._update()
            step, *metrics = self._columns
            return [step, *sorted(metrics)] if self._columns["step"] else []

    def columns(self, names: Iterable[str]) -> dict[str, Column]:
        """Return columns as float64, a value for each line: NaN for none, infinity for one that is no finite number.

        Args:
            names: Those wanted; ``step`` always comes with them, and those that the file lacks are left out.
        """
        with self._lock:
            self._update()
            count = len(self._columns["step"])
            wanted = [name for name in dict.fromkeys(("step", *names)) if name in self._columns] if count else []
            return {name: _padded(self._columns[name], count) for name in wanted}

    def latest(self, rare: Iterable[str] = ()) -> dict[str, float]:
        """Return the last value of each metric within the last 256 KiB of the file.

        Args:
            rare: Metrics that are searched for in the whole file, and later in what is new of it.
        """
        with self._lock, self._opened() as file:
            found = {name: value for name in rare if (value := self._last_value(file, name)) is not None}
            begin = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(begin)
            lines = file.read().splitlines(keepends=True)[begin > 0 :]
        for record in _whole(lines):
            found |= {name: value for name, value in record.items() if math.isfinite(value)}
        return found

    def sampled(self, name: str, count: int) -> tuple[Column, Column]:
        """Return steps and values of about ``count`` lines that are spread over the file, which is not read whole."""
        lines: dict[bytes, None] = {}  # each once, in their order
        with self._opened() as file:
            for begin in np.linspace(0, file.seek(0, os.SEEK_END), count, dtype=np.int64).tolist():
                file.seek(max(0, begin - 1))
                if begin:
                    file.readline(MAX_LINE_BYTES)  # the rest of the line before
                lines[file.readline(MAX_LINE_BYTES)] = None
        found = [
            (record["step"], record[name]) for record in _whole(lines) if math.isfinite(record.get(name, math.inf))
        ]
        table = np.array(found, np.float64).reshape(len(found), 2)
        return table[:, 0], table[:, 1]

    def _last_value(self, file: io.BufferedIOBase, name: str) -> float | None:
        """Return the last finite value of a metric, or ``None``; what was searched before is not read again."""
        end = file.seek(0, os.SEEK_END)
        if not end:
            return None
        stat = os.fstat(file.fileno())
        inode = stat.st_dev, stat.st_ino
        known_inode, begin, value = self._searched.get(name, (inode, 0, None))
        if known_inode != inode or begin > end:
            begin, value = 0, None
        whole = 0
        """End of the last line that is whole."""
        for lines, at in _lines_from_end(file, begin, end):
            whole = whole or at + len(lines)
            values = [record.get(name, math.inf) for record in _whole(_having(lines, name))]
            if finite := [each for each in values if math.isfinite(each)]:
                value = finite[-1]
                break
        self._searched[name] = inode, max(begin, whole), value
        return value

    def _opened(self) -> io.BufferedIOBase:
        path = self._locate()
        try:
            return io.BytesIO() if path is None else path.open("rb")
        except OSError:
            return io.BytesIO()

    def _update(self) -> None:
        """Read the lines that are new."""
        with self._opened() as file:
            if isinstance(file, io.BytesIO):
                self._forget()
                return
            stat = os.fstat(file.fileno())
            inode, mark_at = (stat.st_dev, stat.st_ino), max(0, self._end - MARK_BYTES)
            file.seek(mark_at)
            if inode != self._inode or file.read(self._end - mark_at) != self._mark:
                self._forget()
                self._inode = inode
            file.seek(self._end)
            while line := file.readline(MAX_LINE_BYTES):
                if not line.endswith(b"\n"):
                    break
                self._end += len(line)
                self._mark = (self._mark + line)[-MARK_BYTES:]
                self._add(line)

    def _add(self, line: bytes) -> None:
        record = _parse(line)
        if record is None:
            self.num_damaged += bool(line.strip())
            return
        row = len(self._columns["step"])
        for name, value in record.items():
            if (column := self._columns.get(name)) is None:
                if len(self._columns) == MAX_COLUMNS:
                    continue
                column = self._columns[name] = array("d")
            column.extend([math.nan] * (row - len(column)))
            column.append(value)


def last_values(columns: Mapping[str, Column], name: str) -> tuple[Column, Column]:
    """Return steps and values of the rows with a value; of a step that a resumed run has written again, the last."""
    known = np.isfinite(columns[name])
    steps, values = columns["step"][known], columns[name][known]
    if (np.diff(steps) > 0).all():
        return steps, values
    unique, first_of_reversed = np.unique(steps[::-1], return_index=True)
    return unique, values[::-1][first_of_reversed]


def _lines_from_end(file: io.BufferedIOBase, begin: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Yield blocks of whole lines between two offsets, the last block first, and the offset of each."""
    rest = b""
    """Of a line that begins in an earlier block."""
    while end > begin and len(rest) < MAX_LINE_BYTES:
        at = max(begin, end - BLOCK_BYTES)
        file.seek(at)
        block = file.read(end - at) + rest
        first = (block.find(b"\n") + 1 or len(block)) if at > begin else 0
        rest, lines = block[:first], block[first:]
        if lines:
            yield lines[: lines.rfind(b"\n") + 1], at + first
        end = at


def _having(lines: bytes, name: str) -> Iterator[bytes]:
    """Yield the lines in which a metric is named."""
    key = json.dumps(name).encode()
    at = lines.find(key)
    while at >= 0:
        end = lines.index(b"\n", at) + 1
        yield lines[lines.rfind(b"\n", 0, at) + 1 : end]
        at = lines.find(key, end)


def _padded(column: array[float], count: int) -> Column:
    values = np.full(count, np.nan)
    values[: len(column)] = column
    return values


def _whole(lines: Iterable[bytes]) -> Iterator[dict[str, float]]:
    return (record for line in lines if line.endswith(b"\n") and (record := _parse(line)) is not None)


def _parse(line: bytes) -> dict[str, float] | None:
    """Return the numbers of a line, infinity for what is no finite number; ``None`` for no object with a step."""
    try:
        record = DECODER.decode(line)
    except (ValueError, RecursionError):
        return None
    numbers = {
        name: value if isinstance(value, float) else math.inf for name, value in record.items() if value is not None
    }
    return numbers if math.isfinite(numbers.get("step", math.inf)) else None
