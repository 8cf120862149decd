"""Token logs as the page shows them: an index of their records, and the tokens of one completion as JSON."""

from __future__ import annotations

import codecs
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlplug_watch.page.token_records import read_record
from rlplug_watch.token_log.files import Record, scan, token_files
from rlplug_watch.token_log.step_tokens import StepTokens

MAX_TOKENS: Final = 20_000
"""Most tokens of one answer; the page asks for the next ones."""
DIGITS: Final = 5
"""Digits of numbers that go to the page: float16 has three, and a float32 advantage needs no more to be read."""


class TokenIndex:
    """The records of a token log by step. Threads take turns.

    Args:
        folder: The run's ``tokens`` folder; it need not exist.
        may_read: Whether a file may be read: a link could lead elsewhere.
    """

    def __init__(self, folder: Path, may_read: Callable[[Path], bool]) -> None:
        self.folder = folder
        self._may_read = may_read
        self._lock = threading.Lock()
        self._files: dict[Path, tuple[tuple[int, int], dict[int, Record], list[str]]] = {}
        """Of each file: its size and time when it was read, its records, and what is wrong."""
        self._newest: StepTokens | None = None
        self._newest_record: Record | None = None

    def records(self) -> tuple[dict[int, Record], list[str]]:
        """Return the records by step, and what is wrong with the files. Only what is new is read.

        Raises:
            OSError: A file cannot be read.
        """
        with self._lock:
            known, self._files = self._files, {}
            for path in filter(self._may_read, token_files(self.folder)):
                status = path.stat()
                state = status.st_size, status.st_mtime_ns
                if path in known and known[path][0] == state:
                    self._files[path] = known[path]
                    continue
                records, problems = scan(path)
                self._files[path] = state, {record.step: record for record in records}, problems
            steps = {step: record for _, records, _ in self._files.values() for step, record in records.items()}
            return steps, [problem for _, _, problems in self._files.values() for problem in problems]

    def read(self, step: int) -> StepTokens | None:
        """Return the tokens of a step, or ``None`` where it has none.

        Raises:
            OSError | RunError: They cannot be read, or are damaged.
        """
        record = self.records()[0].get(step)
        if record is None:
            return None
        with self._lock:  # a page asks for one completion of a step after the other
            if record != self._newest_record or self._newest is None:
                self._newest, self._newest_record = read_record(record), record
            return self._newest


def view(tokens: StepTokens, number: int, start: int) -> dict[str, Any]:
    """Return up to ``MAX_TOKENS`` tokens of a completion, from ``start`` on.

    Returns:
        ``total`` and ``start``; ``texts`` of each token; ``columns``: lists of numbers by the names of the token log,
        ``None`` where a token has none.
    """
    columns = tokens.of_row(number)
    ids = columns["token_ids"]
    end = min(len(ids), start + MAX_TOKENS)
    return {
        "total": len(ids),
        "start": start,
        "prompt_tokens": int(tokens.rows["prompt_tokens"][number]),
        "texts": texts([tokens.pieces.get(token_id, b"") for token_id in ids.tolist()])[start:end],
        "columns": {name: as_numbers(values[start:end]) for name, values in sorted(columns.items())},
    }


def texts(pieces: list[bytes]) -> list[str]:
    """Return the text of each token: a character is shown where its last byte is, and bytes of none as ``\\xNN``."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    found = [decoder.decode(piece) for piece in pieces]
    if found:
        found[-1] += decoder.decode(b"", final=True)
    return found


def as_numbers(values: NDArray[Any]) -> list[float | int | None]:
    """Return an array as JSON takes it: a NaN and an infinity are ``None``."""
    if values.dtype.kind != "f":
        found: list[float | int | None] = values.tolist()
        return found
    return [float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None for value in values.tolist()]
