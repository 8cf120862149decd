"""Token log interface: what a step's passes compute for single tokens, and some of it in the run's folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from rlplug.types import Sample, StepBatch


@dataclass(frozen=True)
class TokenLogOptions:
    """What a run wants of its token log.

    Attributes:
        samples_per_step: Most completions of a step that are logged; 0 logs none.
        every_n_steps: Steps from one that is logged to the next; the first step is logged too.
        most_bytes: Size of the log, beyond which its oldest steps are removed.
    """

    samples_per_step: int
    every_n_steps: int
    most_bytes: int


class TokenLog(ABC):
    """Base class of token logs. All ranks call each method at the same place, unless it says otherwise."""

    @abstractmethod
    def begin(self, step: int) -> None:
        """Begin a step, from 1."""

    @abstractmethod
    def add(self, rows: Sequence[tuple[int, int]], num_tokens: Sequence[int], per_token: Mapping[str, Tensor]) -> None:
        """Keep what a pass of the policy gave, in place of what an earlier one gave for the same rows.

        Args:
            rows: Group and place in the group of each row of the pass; none where it only fills a rank's time.
            num_tokens: Trainable tokens of each, the K of all together.
            per_token: Bool or float [K] on the device, detached: ``logprobs``, ``entropy``, what the algorithm gives.
        """

    @abstractmethod
    def compared(self, trainer_logprobs: Tensor) -> None:
        """Keep the trainer's logprobs before the update under the distribution that was sampled, float32 [N]."""

    @abstractmethod
    def choose(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return those of a step's rows, of all ranks, that are logged."""

    @abstractmethod
    def write(self, step: int, chosen: NDArray[Any], samples: Sequence[Sample], batch: StepBatch) -> None:
        """Write the tokens of some rows, and forget the step.

        Args:
            step: Number of the step.
            chosen: What :meth:`choose` returned, which is not empty.
            samples: This rank's samples.
            batch: Their rows, as they trained.

        Raises:
            RunError: A file cannot be written.
        """

    @abstractmethod
    def sync(self) -> None:
        """Wait until all that was written is on the disk. Called on rank 0 alone."""

    @abstractmethod
    def cut_back(self, step: int, aside: Path | None) -> list[str]:
        """Remove what was written after a step, as a run that is resumed will write it again. Called on rank 0 alone.

        Args:
            step: Last step to keep.
            aside: Folder that gets a copy of each file that changes, or ``None``.

        Returns:
            A sentence for each damaged place.
        """
