"""Checks of objects beside each other: those of other runs in the process, and those of a run's ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import pytest

from rlplug.interfaces.algorithm import Advantages, Algorithm
from rlplug.types import StepStatistics
from rlplug_devkit.algorithms.checks import AlgorithmChecks, larger
from rlplug_devkit.algorithms.passes import learn, step_of
from rlplug_devkit.algorithms.steps import Row, batch_of, make_rows, on_ranks, shares_of
from rlplug_devkit.algorithms.training import metrics_of_step, train, trained_otherwise, weighed_otherwise
from rlplug_devkit.claims import DOES_NOT_APPLY
from rlplug_devkit.tasks.calls import NOT_COMPARED

NUM_RANKS: Final = 3
"""Ranks of a run, the last one without completions."""
NUM_STEPS: Final = 3


class RunChecks(AlgorithmChecks):
    """Checks of an algorithm beside another object of its class."""

    def test_runs_do_not_share_their_options(self) -> None:
        """A notebook or a sweep sets up the next run while the former one's objects are there."""
        alone, beside = self._ready(), self._ready()
        try:
            expected = train(alone, self.run, 0, 2)
            if self._ready_for(larger(self.run)) is None:
                pytest.skip(f"{DOES_NOT_APPLY}setup refuses {larger(self.run)}")
            found = train(beside, self.run, 0, 2)
        except Exception:  # noqa: BLE001 - a check of its own
            pytest.skip(NOT_COMPARED)
        differs = trained_otherwise(found, expected, self.tolerance)
        assert not differs, (
            f"when another object was set up for another run, {differs}: keep what setup gets in self, and not in the "
            "class or its module."
        )

    def test_ranks_stay_alike_from_step_to_step(self) -> None:
        """Each rank has an object and a part of every step; what one learns of its part alone drives them apart."""
        alone, *ranks = (self._ready() for _ in range(NUM_RANKS + 1))
        for number in range(NUM_STEPS):
            rows = make_rows(number, self.run.group_size, self.run.max_new_tokens)
            place, parts = {id(row): index for index, row in enumerate(rows)}, shares_of(rows, NUM_RANKS)
            try:
                whole = alone.advantages(batch_of(rows, alone.needs))
                step = step_of(alone, rows, whole)
                learned = learn(step, step.all_rows)
                found = on_ranks(functools.partial(_advantages_of_rank, ranks, parts), NUM_RANKS)
            except Exception:  # noqa: BLE001 - a check of its own
                pytest.skip(NOT_COMPARED)
            for part, mine in zip(found, parts, strict=True):
                indices = [place[id(row)] for row in mine]
                differs = weighed_otherwise(part, whole, batch_of(mine), batch_of(rows), indices, self.tolerance)
                assert not differs or number == 0, (
                    f"after {number} steps of {NUM_RANKS} ranks {differs}: a rank has a part of each step. What is "
                    "kept from step to step comes from batch.step, or from the metrics of after_step."
                )
            for each in (alone, *ranks):
                each.after_step(metrics_of_step(number, whole, learned))


def _advantages_of_rank(
    ranks: Sequence[Algorithm], parts: Sequence[Sequence[Row]], rank: int, statistics: StepStatistics
) -> Advantages:
    return ranks[rank].advantages(batch_of(parts[rank], ranks[rank].needs, statistics))
