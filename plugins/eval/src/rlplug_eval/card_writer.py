"""``CardWriter``: the model card of a run's exported policy."""

from __future__ import annotations

from pathlib import Path

from rlplug.distributed.checkpoints.files import CONFIG
from rlplug.interfaces import ObservedRun, RunObserver


class CardWriter(RunObserver):
    """Writes ``README.md`` into the folder of an exported policy, where the run has a configuration to describe."""

    def begin(self, run: ObservedRun) -> None:
        self._run_dir = run.folder

    def policy_exported(self, folder: Path) -> None:
        from rlplug_eval.card import write_card

        if (self._run_dir / CONFIG).is_file():  # a run that was made in Python has none
            write_card(self._run_dir, folder)
