"""The metrics of a run as CSV, for a spreadsheet."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from rlplug.distributed.durable_files import write_file
from rlplug.observability.metrics_log import read_metrics
from rlplug_watch.report.run_data import METRICS_FILE, require_run


def write_csv(run_dir: Path, path: Path) -> None:
    """Write a row per step and a column per metric, sorted by name; a metric that a step lacks is an empty cell.

    Args:
        run_dir: Folder of a run.
        path: The file.

    Raises:
        ConfigError: It is no run's folder.
        RunError: The metrics cannot be read, or the file not be written.
    """
    require_run(run_dir)
    rows = read_metrics(run_dir / METRICS_FILE)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["step", *sorted({name for row in rows for name in row} - {"step"})])
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue())
