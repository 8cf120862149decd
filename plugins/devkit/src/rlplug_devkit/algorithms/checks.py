"""Base class of the checks of algorithms: settings, which a subclass overrides, and steps to compute."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import pytest

from rlplug.errors import ConfigError, describe
from rlplug.interfaces.algorithm import Advantages, Algorithm, RunInfo
from rlplug_devkit.algorithms.passes import Step, learn, step_of
from rlplug_devkit.algorithms.steps import NUM_GROUPS, Row, batch_of, make_rows, on_ranks, shares_of
from rlplug_devkit.algorithms.training import metrics_of_step
from rlplug_devkit.tasks.calls import NOT_COMPARED, TaskChecks

SEEDS = (0, 1, 2)
FACTORS = (0.0, 10.0)
"""What metrics of steps are multiplied by, for an algorithm that follows them."""
NUM_OBSERVED = 5
"""Steps of such metrics."""


class AlgorithmChecks(TaskChecks):
    """Settings of an algorithm under test. A subclass must override ``make_algorithm``, and may override the rest.

    Attributes:
        run: The run that the algorithm is set up for. Steps have six groups of its ``group_size``.
        zero_advantages: Where equal rewards give advantages of 0: in each ``group`` whose rewards are equal, in a
            ``step`` whose rewards are all equal, or ``never``, as where a critic's values or a penalty count too.
        trains_every_token: Whether each trainable token with an advantage gets a gradient when policy and old policy
            are the same; false where a loss chooses tokens itself, and ``Advantages.trains`` does not say so.
        learns_from_rewards: Whether better completions of a group become more likely, and worse ones less; false where
            a critic's values decide too, which the kit draws, as in plain generalised advantage estimation.
        tolerance: Largest difference between results that must be equal, as a share of the largest entry.
    """

    run: ClassVar[RunInfo] = RunInfo(num_completions=4 * NUM_GROUPS, group_size=4, max_new_tokens=12)
    zero_advantages: ClassVar[Literal["group", "step", "never"]] = "group"
    trains_every_token: ClassVar[bool] = True
    learns_from_rewards: ClassVar[bool] = True
    tolerance: ClassVar[float] = 1e-4

    def make_algorithm(self) -> Algorithm:
        """Return the algorithm, as a YAML file would make it."""
        raise NotImplementedError(f"{type(self).__name__}.make_algorithm must return the algorithm to test")

    def _subject(self) -> str:
        return type(self.make_algorithm()).__name__

    def _ready(self) -> Algorithm:
        return self._made_for(self.run)

    def _ready_for(self, run: RunInfo) -> Algorithm | None:
        """Return the algorithm set up for another run; ``None`` where it refuses that with a ConfigError."""
        algorithm = self.make_algorithm()
        try:
            algorithm.setup(run)
        except ConfigError:
            return None
        except Exception as error:  # noqa: BLE001 - the algorithm's own
            pytest.fail(
                f"setup raised {describe(error)} for {run}: a run that is not possible is a ConfigError.", pytrace=False
            )
        return algorithm

    def _made_for(self, run: RunInfo) -> Algorithm:
        """Return the algorithm set up for a run that it takes."""
        algorithm = self.make_algorithm()
        algorithm.setup(run)
        return algorithm

    def _rows(self, seed: int = 0) -> list[Row]:
        return make_rows(seed, self.run.group_size, self.run.max_new_tokens)

    def _step(self, rows: Sequence[Row], algorithm: Algorithm | None = None) -> Step:
        """Return a step with its advantages; skip the check where they cannot be computed."""
        algorithm = algorithm or self._ready()
        try:
            result = algorithm.advantages(batch_of(rows, algorithm.needs))
            return step_of(algorithm, rows, result)
        except Exception:  # noqa: BLE001 - a check of its own
            pytest.skip(NOT_COMPARED)

    def _algorithms(self) -> Iterator[Algorithm]:
        """Yield a new algorithm, and those that saw steps of small and large numbers: coefficients may begin at 0."""
        yield self._ready()
        for factor in FACTORS:
            algorithm, rows = self._ready(), self._rows()
            try:
                result = algorithm.advantages(batch_of(rows, algorithm.needs))
                step = step_of(algorithm, rows, result)
                metrics = metrics_of_step(0, result, learn(step, step.all_rows))
                for number in range(NUM_OBSERVED):
                    factors = {name: factor * value for name, value in metrics.items()}
                    algorithm.after_step(factors | {"step": float(number + 1)})
            except Exception:  # noqa: BLE001 - a check of its own
                pytest.skip(NOT_COMPARED)
            yield algorithm

    def _advantages(self, rows: Sequence[Row], algorithm: Algorithm | None = None) -> Advantages:
        """Return advantages, skip the check where they cannot be computed."""
        algorithm = algorithm or self._ready()
        try:
            return algorithm.advantages(batch_of(rows, algorithm.needs))
        except Exception:  # noqa: BLE001 - a check of its own
            pytest.skip(NOT_COMPARED)

    def _on_ranks(self, rows: Sequence[Row], size: int) -> list[tuple[list[Row], Advantages]]:
        """Return each rank's rows and their advantages; each rank has an algorithm of its own."""
        shares = shares_of(rows, size)

        def call(rank: int, statistics: Any) -> tuple[list[Row], Advantages]:
            algorithm = self._ready()
            return shares[rank], algorithm.advantages(batch_of(shares[rank], algorithm.needs, statistics))

        try:
            return on_ranks(call, size)
        except threading.BrokenBarrierError:
            pytest.fail(
                "ranks called different methods of batch.step, and would wait for each other for ever: call the same "
                "ones in the same order on every rank, on one without completions too.",
                pytrace=False,
            )
        except Exception as error:  # noqa: BLE001 - the algorithm's own
            pytest.fail(f"advantages raised on a rank with a part of the step: {describe(error)}", pytrace=False)


def larger(run: RunInfo) -> RunInfo:
    """Return another run, with larger groups, longer completions and another seed."""
    size = run.group_size + 2
    longest = run.max_new_tokens + 5
    return dataclasses.replace(
        run, group_size=size, num_completions=NUM_GROUPS * size, max_new_tokens=longest, seed=run.seed + 1
    )
