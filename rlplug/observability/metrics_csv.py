"""Logger of ``metrics.csv``, with one row per RL step; every run has it besides its other loggers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only


class MetricsCSV(Logger):
    """Logger that appends a row per step, and rewrites the file when a metric appears for the first time.

    Lightning's own CSVLogger starts a new file at each resume; this one continues the file of the resumed run.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._columns: list[str] = []
        if path.is_file():
            with path.open(newline="") as file:
                self._columns = list(csv.DictReader(file).fieldnames or [])

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the run folder has the resolved configuration."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row: dict[str, Any] = {"step": step, **metrics}
        if new := [name for name in row if name not in self._columns]:
            rows = self.read()
            self._columns = ["step", *sorted({*self._columns, *new} - {"step"})]
            self._write([*rows, row])
            return
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def read(self) -> list[dict[str, Any]]:
        """Return the rows so far, with values as text."""
        if not self.path.is_file():
            return []
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))

    @rank_zero_only
    def drop_after(self, step: int) -> None:
        """Remove the rows after ``step``: a run that resumes from there writes them again."""
        rows = self.read()
        kept = [row for row in rows if int(row["step"]) <= step]
        if len(kept) < len(rows):
            self._write(kept)

    def _write(self, rows: list[dict[str, Any]]) -> None:
        partial = self.path.with_suffix(".partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        partial.replace(self.path)
