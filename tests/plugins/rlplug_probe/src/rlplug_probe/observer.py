"""An observer that writes down what it sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlplug.interfaces import ObservedRun, RunObserver, StepRecord, Validation


class Witness(RunObserver):
    """Writes ``witness.json`` into the run folder, and says how many steps it saw."""

    def begin(self, run: ObservedRun) -> None:
        self._run = run
        self._steps: list[dict[str, Any]] = []
        self._seen: dict[str, Any] = {"stage": run.stage, "steps": self._steps, "validated": [], "exported": []}

    def step_ended(self, record: StepRecord) -> None:
        mean = sum(sample.reward for sample in record.samples) / len(record.samples)
        self._steps.append({"step": record.step, "metric": record.metrics["reward/mean"], "of_samples": mean})

    def validated(self, validation: Validation) -> None:
        self._seen["validated"].append(validation.step)

    def policy_exported(self, folder: Path) -> None:
        self._seen["exported"].append(folder.name)

    def ended(self) -> list[str]:
        (self._run.folder / "witness.json").write_text(json.dumps(self._seen))
        return [f"the probe saw {len(self._steps)} steps"]
