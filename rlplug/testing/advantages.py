"""Advantages of a padded batch, for tests of algorithms and of hooks."""

from __future__ import annotations

from rlplug.interfaces import Algorithm
from rlplug.training.advantages import compute_advantages
from rlplug.types import Batch, StepBatch


def with_advantages(algorithm: Algorithm, batch: Batch) -> Batch:
    """Return a padded batch with the advantages, returns and mask that a run of one rank would train on.

    Raises:
        RunError: A tensor of the algorithm has a wrong shape.
    """
    return compute_advantages(algorithm, StepBatch.from_padded(batch), list)[0].padded
