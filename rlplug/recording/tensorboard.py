"""TensorBoard's logger of a run, which a full disk does not let end the run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray

from rlplug.distributed.durable_files import reason


class RunTensorBoard(TensorBoardLogger):
    """Logger that stops with a warning when its file cannot be written: ``metrics.jsonl`` has the same numbers."""

    _has_failed = False

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._try(super().log_metrics, metrics, step)

    def log_hyperparams(self, *arguments: Any, **options: Any) -> None:
        self._try(functools.partial(super().log_hyperparams, *arguments, **options))

    def add_text(self, name: str, text: str, step: int) -> None:
        """Log a text of a step."""
        self._try(self.experiment.add_text, name, text, step)

    def add_histogram(self, name: str, values: NDArray[Any], step: int) -> None:
        """Log the distribution of a step's values."""
        self._try(self.experiment.add_histogram, name, values, step)

    def save(self) -> None:
        self._try(super().save)

    def finalize(self, status: str) -> None:
        self._try(super().finalize, status)

    def _try(self, write: Callable[..., Any], *arguments: Any) -> None:
        if self._has_failed:
            return
        try:
            write(*arguments)
        except (OSError, ValueError, RuntimeError) as error:
            self._has_failed = True
            rank_zero_warn(f"{self.log_dir} gets no more metrics, because it cannot be written: {reason(error)}.")
