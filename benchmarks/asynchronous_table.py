"""The table and the picture of the runs of ``asynchronous.py``, from the metrics that they have written."""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rlplug.observability.metrics_log import read_metrics

Rows = list[dict[str, float]]
Runs = dict[str, dict[int, Rows]]
"""Rows of metrics, by mode and seed."""

WINDOW: Final = 5
"""Steps that rewards are averaged over."""
COLUMNS: Final = (
    *("step", "seconds", "reward/mean", "partial/staleness_mean", "partial/staleness_max", "partial/resumed"),
    *("partial/wait_s", "mismatch/mean", "validate/pass@1"),
)


def folder_of(mode: str, seed: int | str, out: Path) -> Path:
    """Return the folder of a run."""
    return out / "runs" / f"{mode}-{seed}".replace(", ", "-").replace(" = ", "").replace(" ", "-")


def read_all(out: Path, modes: Sequence[str]) -> Runs:
    """Return the rows of all runs of ``modes`` below ``out`` that have any."""
    runs: Runs = {mode: {} for mode in modes}
    for mode, seeds in runs.items():
        for folder in sorted((out / "runs").glob(folder_of(mode, "*", out).name)):
            if rows := read(folder):
                seeds[int(folder.name.rpartition("-")[2])] = rows
    return {mode: seeds for mode, seeds in runs.items() if seeds}


def read(folder: Path) -> Rows:
    """Return a row for each step that a run has ended, with its seconds so far, without an unfinished last line."""
    rows, seconds = [], 0.0
    for row in read_metrics(folder / "001" / "metrics.jsonl"):
        if "reward/mean" in row and "time/step" in row:
            seconds += row["time/step"] - row.get("time/validate", 0.0)
            rows.append(row | {"seconds": seconds})
    return rows


def table(runs: Runs) -> str:
    """Return a row per mode: over its seeds, the mean and in brackets the smallest and the largest."""
    lines = [
        f"| mode | seeds | steps | reward, all steps | reward, last {WINDOW} steps | held-out pass@1 "
        "| s/step (median) | staleness, mean | largest | trajectories resumed a step |",
        "|-" * 10 + "|",
    ]
    for mode, seeds in runs.items():
        rewards = [column(rows, "reward/mean") for rows in seeds.values()]
        solved = [value for rows in seeds.values() for value in column(rows, "validate/pass@1")[-1:]]
        ends = [[0.0, *column(rows, "seconds")] for rows in seeds.values()]
        every = list(itertools.chain.from_iterable(seeds.values()))
        stale, largest, resumed = (column(every, name) or [0.0] for name in COLUMNS[3:6])
        cells = [
            *(mode, str(len(seeds)), str(min(map(len, seeds.values())))),
            _range([statistics.fmean(values) for values in rewards]),
            _range([statistics.fmean(values[-WINDOW:]) for values in rewards]),
            _range(solved) if solved else "-",
            f"{statistics.median(b - a for times in ends for a, b in itertools.pairwise(times)):.2f}",
            f"{statistics.fmean(stale):.2f}",
            f"{max(largest):.0f}",
            f"{statistics.fmean(resumed):.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def column(rows: Rows, name: str) -> list[float]:
    """Return the values of a metric, without the steps that have none."""
    return [row[name] for row in rows if name in row]


def _range(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def write(out: Path, modes: Sequence[str], samples_per_step: int, is_shared: bool) -> None:
    """Write ``table.md``, ``curves.csv`` and ``curves.png`` of the runs that ``out`` has."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    runs = read_all(out, modes)
    (out / "table.md").write_text(table(runs))
    with (out / "curves.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["mode", "seed", "samples", *COLUMNS])
        for mode, seeds in runs.items():
            for seed, row in ((seed, row) for seed, rows in seeds.items() for row in rows):
                cells = [f"{row[name]:.4g}" if name in row else "" for name in COLUMNS]
                writer.writerow([mode, seed, row["step"] * samples_per_step, *cells])
    figure, (by_samples, by_seconds) = pyplot.subplots(1, 2, figsize=(13, 5), dpi=110, sharey=True)
    for mode, seeds in runs.items():
        rewards = _means([column(rows, "reward/mean") for rows in seeds.values()])
        smooth = [statistics.fmean(rewards[max(0, n - WINDOW) : n]) for n in range(1, len(rewards) + 1)]
        by_samples.plot([samples_per_step * n for n in range(1, len(smooth) + 1)], smooth, label=mode, linewidth=1.2)
        by_seconds.plot(_means([column(rows, "seconds") for rows in seeds.values()]), smooth, label=mode, linewidth=1.2)
    by_samples.set(xlabel="samples trained on", ylabel=f"mean reward, average of {WINDOW} steps")
    by_seconds.set(xlabel="seconds of steps" + (", on a machine that all runs shared" if is_shared else ""))
    by_samples.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "curves.png")
    pyplot.close(figure)


def _means(of_seeds: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean over seeds at each step that all seeds have."""
    return [statistics.fmean(values) for values in zip(*of_seeds, strict=False)]
