"""``ReportWriter``: the summary of a profile, and advice and ``report.html`` at the end of a run."""

from __future__ import annotations

import json

from rlplug.errors import describe
from rlplug.interfaces import ObservedRun, ProfiledSteps, RunObserver
from rlplug.recording.run_record import RECORD


class ReportWriter(RunObserver):
    """Says what a profile and a run's metrics show, and writes the report where the run wants one."""

    def begin(self, run: ObservedRun) -> None:
        self._run = run

    def profiled(self, profile: ProfiledSteps) -> list[str]:
        from rlplug_watch.profile.files import write_summary

        return write_summary(profile)

    def ended(self) -> list[str]:
        from rlplug_watch.advice import advise
        from rlplug_watch.config_values import flat_config
        from rlplug_watch.levers import describe_shares, levers
        from rlplug_watch.report.run_data import CONFIG_FILE, read_metrics

        folder = self._run.folder
        record = json.loads((folder / RECORD).read_text())
        metrics = read_metrics(folder, [])
        time = describe_shares(metrics)
        lines = [] if time is None else [f"time: {time}"]
        pieces = [*levers(metrics, record, flat_config(folder / CONFIG_FILE)), *advise(metrics, record)]
        lines += [f"advice: {piece.text} Key: {piece.setting}; {piece.url}" for piece in pieces]
        if self._run.report:
            from rlplug_watch.report.page import write_report

            try:
                lines.append(f"report: {write_report(folder)}")
            except Exception as error:  # noqa: BLE001 - the training has ended well
                lines.append(f"no report: {describe(error, with_line=True)}")
        return lines
