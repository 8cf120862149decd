"""Logger of ``metrics.csv``, with one row per RL step; every run has it besides its other loggers."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from rlplug.distributed.durable_files import RowFile, explained, losses, write_file


class MetricsCSV(Logger):
    """Logger that appends a row per step, and rewrites the file when a metric appears for the first time.

    Lightning's own CSVLogger starts a new file at each resume; this one continues the file of the resumed run.

    Args:
        path: The file.
        waits: Keep rows in memory until :meth:`cut_back`, because a file of a former run must not change before the
            resumed run is accepted.
    """

    def __init__(self, path: Path, waits: bool = False) -> None:
        super().__init__()
        self.path = path
        self._rows = RowFile(path)
        self._waiting: list[dict[str, Any]] | None = [] if waits else None
        self._columns: list[str] | None = None
        """Columns of the file, once it has been read."""

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the run folder has the resolved configuration."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        # a bool, or a tensor of one number, would not be read back
        numbers = {name: value if type(value) in (int, float) else float(value) for name, value in metrics.items()}
        row: dict[str, Any] = {"step": step, **numbers}
        if self._waiting is not None:
            self._waiting.append(row)
            return
        if self._columns is None:
            self._columns = self._read()[0]
        if new := [name for name in row if name not in self._columns]:
            columns = ["step", *sorted({*self._columns, *new} - {"step"})]
            self._write(columns, [*self.read(), row])
        else:
            self._rows.append(_as_text(self._columns, [row], header=False))

    @rank_zero_only
    def amend(self, metrics: Mapping[str, float], step: int) -> None:
        """Add metrics to the row of a former step, which gets a row if it has none; the file is rewritten."""
        columns, rows, _ = self._read()
        row = next((row for row in rows if int(row["step"]) == step), None)
        if row is None:
            row = {"step": step}
            rows = sorted([*rows, row], key=lambda each: int(each["step"]))
        row |= {name: float(value) for name, value in metrics.items()}
        self._write(["step", *sorted({*columns, *row} - {"step"})], rows)

    def sync(self) -> None:
        """Wait until all rows are on the disk."""
        self._rows.sync()

    def read(self) -> list[dict[str, Any]]:
        """Return the whole rows so far, with values as text."""
        return self._read()[1]

    def cut_back(self, step: int) -> list[str]:
        """Remove the rows after ``step``, and those that are torn; a run that resumes from there writes its own.

        A file without its header goes aside. Rows that were logged since the logger began are written.

        Returns:
            A sentence for each kind of row that is lost.

        Raises:
            RunError: The file cannot be read or written.
        """
        columns, rows, num_torn = self._read()
        kept = [row for row in rows if int(row["step"]) <= step]
        said = losses(self.path, num_torn, set(range(1, step + 1)) - {int(row["step"]) for row in kept})
        if not columns and self.path.exists():
            aside = self.path.with_name("metrics.damaged.csv")
            with explained(aside):
                self.path.replace(aside)
            said.insert(0, f"{self.path}: its first line is damaged, so it is now {aside.name}.")
        elif num_torn or len(kept) < len(rows):
            self._write(columns, kept)
        self._columns = columns
        waiting, self._waiting = self._waiting or [], None
        for row in waiting:
            self.log_metrics(row, step=row["step"])
        return said

    def _read(self) -> tuple[list[str], list[dict[str, Any]], int]:
        """Return columns, whole rows and the number of others; no columns for a file that is absent or has no header.

        Raises:
            RunError: The file cannot be read.
        """
        with explained(self.path):
            text = self.path.read_bytes().decode("utf-8", errors="replace") if self.path.exists() else ""
        records = _records(text)
        columns = next(records, None) or []
        if columns[:1] != ["step"] or len(set(columns)) < len(columns) or any(_is_damaged(name) for name in columns):
            return [], [], 0
        rows, num_torn = [], 0
        for record in records:
            if record is not None and len(record) == len(columns) and _is_whole(record):
                rows.append(dict(zip(columns, record, strict=True)))
            else:
                num_torn += 1
        return columns, rows, num_torn

    def _write(self, columns: list[str], rows: Sequence[Mapping[str, Any]]) -> None:
        write_file(self.path, _as_text(columns, rows, header=True))
        self._columns = columns


def _records(text: str) -> Any:
    """Yield the records of a CSV text as lists, and ``None`` for what is none, such as an end that is cut off."""
    whole, _, rest = text.rpartition("\n")
    reader = csv.reader(io.StringIO(whole, newline=""))
    while True:
        try:
            if record := next(reader):  # lines that are empty do no harm
                yield record
        except StopIteration:
            break
        except csv.Error:
            yield None
    if rest:
        yield None


def _is_damaged(name: str) -> bool:
    return "\0" in name or "\ufffd" in name


def _is_whole(record: list[str]) -> bool:
    """Return whether a record has a step, and numbers or nothing after it."""
    try:
        int(record[0])
        for value in record[1:]:
            float(value or 0)
    except ValueError:
        return False
    return True


def _as_text(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], header: bool) -> str:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, columns)
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
