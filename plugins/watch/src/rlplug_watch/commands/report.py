"""``rlplug report``: the page of a run, or its metrics as a spreadsheet, written from its files."""

from __future__ import annotations

import argparse
from pathlib import Path


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "rlplug report", description="Write report.html, or a spreadsheet, from the folder of a run."
    )
    parser.add_argument("run_dir", type=Path, help="a run's folder, such as runs/quickstart/001")
    parser.add_argument(
        "--steps",
        help="steps such as 10-14 that the timeline of trainer and engine shows, which runs with a partial rollout "
        "record; by default the newest",
    )
    parser.add_argument(
        "--single-file",
        action="store_true",
        help="put plotly's script, 4.8 MB, into the page, so that it can be mailed; else beside the run folders",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the metrics to FILE as a spreadsheet instead")
    return parser


def report_command(arguments: list[str]) -> None:
    """Write report.html from the folder of a run, or its metrics as a spreadsheet: RUN [--csv FILE].

    Raises:
        ConfigError: It is no run's folder, it has none of the steps, or plotly is not installed.
        RunError: The spreadsheet cannot be written.
    """
    options = make_parser().parse_args(arguments)
    if options.csv is not None:
        from rlplug_watch.report.spreadsheet import write_csv

        write_csv(options.run_dir, options.csv)
        print(options.csv)
        return
    from rlplug_watch.report.page import write_report
    from rlplug_watch.report.timeline import NEWEST, ChosenSteps

    steps = NEWEST if options.steps is None else ChosenSteps.parse(options.steps)
    print(write_report(options.run_dir, steps, options.single_file))
