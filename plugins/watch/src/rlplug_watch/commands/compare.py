"""``rlplug compare``: what differs between two runs, in the terminal or as JSON, with an exit status for CI."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlplug_watch.comparison import Comparison, Difference, Row


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "rlplug compare",
        description="Compare a run with an earlier one: reward, validation, speed, mismatch, loss and memory, with 95% "
        "intervals, and the keys and versions that differ. The exit status is 1 where a metric is worse. Intervals are "
        "of the steps of these two runs: what another seed would change is not in them.",
    )
    parser.add_argument("run_a", type=Path, help="folder of the run to compare with, such as runs/quickstart/001")
    parser.add_argument("run_b", type=Path, help="folder of the run that may be better or worse")
    parser.add_argument(
        "--steps",
        metavar="FIRST-LAST",
        type=_steps,
        help="steps such as 50-100; by default the later half that both have",
    )
    parser.add_argument(
        "--tolerance",
        type=_share,
        default=0.02,
        metavar="SHARE",
        help="a change up to this share counts as none; 0.02 by default",
    )
    parser.add_argument("--metrics", nargs="+", default=[], metavar="NAME", help="further metrics of metrics.jsonl")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def compare_command(arguments: list[str]) -> int:
    """Compare a run with an earlier one; exit status 1 where it is worse: RUN_A RUN_B.

    Raises:
        ConfigError: A folder is no run's, or the runs have nothing in common.
    """
    options = make_parser().parse_args(arguments)
    from rlplug_watch.comparison import compare_runs

    found = compare_runs((options.run_a, options.run_b), options.metrics, options.steps, options.tolerance)
    if options.json:
        rows = [{**asdict(row), "change": row.change if math.isfinite(row.change) else None} for row in found.rows]
        print(json.dumps(asdict(found) | {"rows": rows, "is_worse": found.is_worse}, indent=2))
    else:
        _print(found)
    return int(found.is_worse)


def _print(found: Comparison) -> None:
    from rlplug.observability.terminal import make_table, say, show

    first, last = found.steps
    columns = ("metric", "A", "B", "change", "95% interval of B - A", "B is")
    show(
        make_table(
            columns, map(_cells, found.rows), f"A: {found.names[0]}  B: {found.names[1]}  steps {first} to {last}"
        )
    )
    for title, differing in (("configuration", found.config), ("versions", found.versions)):
        if differing:
            show(make_table((title, "A", "B"), map(_difference_cells, differing), ""))
        else:
            say(f"{title}: no difference")
    for note in found.notes:
        say(note, wraps=True)


def _cells(row: Row) -> Sequence[str]:
    change = f"{row.change:+.1%}" if math.isfinite(row.change) else "from 0"
    interval = ""
    if row.interval is not None and row.name != "memory":
        low, high = row.interval
        interval = f"{low:+.4g} to {high:+.4g}"
    unit = " GiB" if row.name == "memory" else ""
    return (
        row.name,
        f"{row.before:.4g}{unit}",
        f"{row.after:.4g}{unit}",
        change,
        interval,
        row.verdict or "too few steps",
    )


def _difference_cells(each: Difference) -> Sequence[str]:
    return each.name, *("not set" if value is None else value for value in (each.before, each.after))


def _steps(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of steps: write 50-100")
    return int(first), int(last)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write a number from 0 to below 1, such as 0.02")
    return value
