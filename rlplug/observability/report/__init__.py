"""The report of a run: one HTML file that needs no network, made from what a run folder holds."""

from rlplug.observability.report.page import write_report

__all__ = ["write_report"]
