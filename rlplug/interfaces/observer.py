"""Observer interface: what looks at a run gets one frozen record a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray

from rlplug.interfaces.rollout import ScrapeTargets
from rlplug.types import Sample, StepBatch

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

TIMES = "time/"
"""Beginning of the names of metrics that are seconds of a phase."""


@dataclass(frozen=True)
class ObservedRun:
    """The run that an observer sees.

    Attributes:
        folder: The run's own folder. Nothing may be written there before :meth:`RunObserver.engine_started`: a run that
            is resumed may still be refused.
        stage: ``fit``, or ``validate`` for ``rlplug validate``.
        is_first_rank: Whether this process has rank 0, which alone should write.
        report: Whether the user wants a report at the end, ``run.report``.
    """

    folder: Path
    stage: str
    is_first_rank: bool
    report: bool


@dataclass(frozen=True)
class StepRecord:
    """One step that has ended. Whoever keeps it keeps the step's samples in memory.

    Attributes:
        step: Number of the step, from 1.
        metrics: Metrics of all ranks, as loggers get them, with scores of a validation that ran beside the step.
        samples: This rank's samples that trained.
        batch: Their rows as they trained, advantages included.
        values: ``reward`` and ``completion_length`` of all ranks' samples that have a reward, float [samples].
    """

    step: int
    metrics: Mapping[str, float]
    samples: tuple[Sample, ...]
    batch: StepBatch
    values: Mapping[str, NDArray[Any]]

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of each phase on this rank, by its name, and of the whole ``step``."""
        return {name.removeprefix(TIMES): s for name, s in self.metrics.items() if name.startswith(TIMES)}


@dataclass(frozen=True)
class Validation:
    """Scores of the policy after a step.

    Attributes:
        samples: This rank's samples, with rewards.
        scores: ``validate/...`` over the samples of all ranks.
    """

    step: int
    samples: Sequence[Sample]
    scores: Mapping[str, float]


@dataclass(frozen=True)
class ProfiledSteps:
    """Steps that torch's profiler has recorded.

    Attributes:
        trace: File with the trace in Chrome's format, which is compressed and renamed afterwards.
        steps: ``5``, or ``5-7``.
        device: Device of the rank that recorded it, the first.
    """

    trace: Path
    steps: str
    device: torch.device


class RunObserver:
    """Base class of observers; each method does nothing until it is overridden.

    A plugin gives one by the hook ``rlplug_make_observer``; if it is a callback too, it joins the trainer's. A callback
    or logger of Lightning's trainer that has this base class too is an observer as well. Every method is called on
    every rank, at the same place of the run, unless it says otherwise. An exception ends the run, and is its error.
    """

    def begin(self, run: ObservedRun) -> None:
        """See the run before its models are loaded.

        Raises:
            RLPlugError: The run cannot be observed as it was asked; it ends on all ranks.
        """

    def engine_started(self, targets: ScrapeTargets | None) -> None:
        """See that the engine runs, and again whenever the addresses of its servers have changed.

        Args:
            targets: Addresses of metrics; ``None`` for an engine without servers.
        """

    def rewards_failed(self, step: int, samples: Sequence[Sample]) -> None:
        """See this rank's samples of a step whose reward failed; another rank may have some when this one has none."""

    def step_ended(self, record: StepRecord) -> None:
        """See a step, once it has been logged."""

    def validated(self, validation: Validation) -> None:
        """See scores of held-out prompts; those of the step before may come after a step that trained beside them."""

    def policy_exported(self, folder: Path) -> None:
        """See a folder with the trained policy, or with its adapter. Called on rank 0 alone."""

    def profiled(self, profile: ProfiledSteps) -> Iterable[str]:
        """Return lines that say what a profile shows. Called on rank 0 alone."""
        return ()

    def ended(self) -> Iterable[str]:
        """Return lines that say what was found or written, when a training has finished. Called on rank 0 alone."""
        return ()


class ExperimentLog:
    """Base class of what experiment loggers get besides metrics, which does nothing. Called on rank 0 alone.

    Attributes:
        loggers: Loggers that the run gets besides its own, on every rank.
    """

    loggers: Sequence[Logger] = ()

    def configuration(self, config_yaml: str) -> None:
        """Log the resolved configuration, in which secrets are not masked."""

    def resumed(self, step: int) -> None:
        """Drop what the run logged after ``step``, which it logs again; called before anything of that is logged."""

    def step_ended(self, record: StepRecord, chosen: Sequence[Sample]) -> None:
        """Log what is wanted of a step, and of those samples of all ranks that ``samples.jsonl`` gets."""

    def validated(self, step: int, chosen: Sequence[Sample]) -> None:
        """Log such samples of held-out prompts."""
