"""Logger of ``metrics.jsonl``, with a line per RL step, and its reader; every run has it besides its other loggers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from rlplug.distributed.durable_files import RowFile, explained, whole_lines


class MetricsLog(Logger):
    """Logger that appends a JSON object per step: ``{"step": 3, "loss": 0.5, "reward/mean": "NaN"}``.

    JSON has no NaN and no infinity. They are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float``
    of Python and ``Number`` of JavaScript take. What comes late for a step, such as a validation beside the training,
    is a further line of that step.

    Args:
        path: The file.
        waits: Keep lines in memory until :meth:`end_wait`, because a file of a former run must not change before the
            resumed run is accepted.
    """

    def __init__(self, path: Path, waits: bool = False) -> None:
        super().__init__()
        self._rows = RowFile(path)
        self._waiting: list[str] | None = [] if waits else None

    @property
    def name(self) -> str:
        return self._rows.path.stem

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the run folder has the resolved configuration."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        line = json.dumps({"step": step} | {name: _json_number(value) for name, value in metrics.items()}) + "\n"
        if self._waiting is not None:
            self._waiting.append(line)
        else:
            self._rows.append(line)

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        self._rows.sync()

    def end_wait(self) -> None:
        """Write the lines that waited, and from now on each at once.

        Raises:
            RunError: The file cannot be written.
        """
        if self._waiting:
            self._rows.append("".join(self._waiting))
        self._waiting = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step by name, and the step as ``step``, in the order of steps.

    Where a step has several lines, they are merged: of two values of a metric the later one counts. Lines that are torn
    or have something other than numbers are left out. A file that is absent has no steps.

    Raises:
        RunError: The file cannot be read.
    """
    steps: dict[int, dict[str, Any]] = {}
    with explained(path, "read"):
        for record in whole_lines(path):
            try:
                values = {name: float(value) for name, value in record.items() if name != "step"}
            except (TypeError, ValueError, OverflowError):
                continue
            steps.setdefault(record["step"], {"step": record["step"]}).update(values)
    return [steps[step] for step in sorted(steps)]


def _json_number(value: Any) -> float | str:
    """Return a number, a bool or a tensor of one number as JSON can have it."""
    number = value if type(value) in (int, float) else float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
