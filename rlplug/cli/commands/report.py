"""``rlplug report``: the page of a run, written from its files."""

from __future__ import annotations

import argparse
from pathlib import Path


def report_command(arguments: list[str]) -> None:
    """Write a run's report and print where it is.

    Args:
        arguments: Those after the command's name: the run's folder.

    Raises:
        ConfigError: It is no run's folder, or plotly is not installed.
    """
    parser = argparse.ArgumentParser("rlplug report", description="Write report.html from the folder of a run.")
    parser.add_argument("run_dir", type=Path, help="a run's folder, such as runs/quickstart/001")
    run_dir = parser.parse_args(arguments).run_dir
    from rlplug.observability.report.page import write_report

    print(write_report(run_dir))
