"""The callback that says of an error by which memory ran out: in which phase, what was there, and what to change."""

from __future__ import annotations

import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning.pytorch import Callback

from rlplug.distributed.durable_files import write_file
from rlplug.errors import RunError
from rlplug.interfaces import RunObserver
from rlplug.recording.run_record import RECORD

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from rlplug.interfaces.observer import ObservedRun
    from rlplug.interfaces.rollout import ScrapeTargets
    from rlplug_plan.shortage import Shortage

FOLDER: Final = "out_of_memory"


class MemoryErrors(Callback, RunObserver):
    """Notes on an error by which a GPU's memory ran out (``add_note``) what a person needs to know of it.

    Each rank does so for its own error, without asking the others: they may be anywhere. The message and the traceback
    are also in ``out_of_memory/`` in the run folder, unless that is of a run that was to be resumed and did not start.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        """The run folder, once it may be written to."""
        self._resumed: Path | None = None

    def begin(self, run: ObservedRun) -> None:
        is_resumed = (run.folder / RECORD).exists()
        self._folder, self._resumed = (None, run.folder) if is_resumed else (run.folder, None)

    def engine_started(self, targets: ScrapeTargets | None) -> None:
        self._folder = self._folder or self._resumed

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        from rlplug.interfaces.memory_plan import out_of_memory

        module: Any = pl_module
        cause = out_of_memory(exception)
        if cause is None:
            return
        from rlplug_plan.measurements import shortage_of
        from rlplug_plan.shortage import message

        shortage = shortage_of(module, trainer, cause)
        text = message(shortage)
        path = None if self._folder is None else _write(self._folder, shortage, text, exception)
        text += f"\nTraceback: {path or 'rlplug --debug shows it'}"
        exception.__notes__ = [text, *getattr(exception, "__notes__", [])]  # others may have noted a snapshot


def _write(run_dir: Path, shortage: Shortage, text: str, error: BaseException) -> Path | None:
    """Write message and traceback to the run folder; return the file, or ``None`` where it cannot be written."""
    path = run_dir / FOLDER / f"step-{shortage.step:08d}-rank-{shortage.rank}.txt"
    with suppress(OSError, RunError):
        path.parent.mkdir(parents=True, exist_ok=True)
        found = "".join(traceback.format_exception(error))
        write_file(path, f"{text}\n\n{found}")
        return path
    return None
