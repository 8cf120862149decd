"""Report of a run: one HTML file that needs no network, written from the files of the run folder."""

from rlplug.observability.report.page import write_report

__all__ = ["write_report"]
