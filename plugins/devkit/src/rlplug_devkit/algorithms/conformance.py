"""``AlgorithmConformance``: checks that every algorithm must pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlplug.errors import describe
from rlplug.interfaces.algorithm import Algorithm
from rlplug.types import groups_of
from rlplug_devkit.algorithms.advantages import AdvantageChecks
from rlplug_devkit.algorithms.checks import AlgorithmChecks
from rlplug_devkit.algorithms.losses import LossChecks
from rlplug_devkit.algorithms.passes import Learned, difference, learn, step_of
from rlplug_devkit.algorithms.steps import batch_of
from rlplug_devkit.tasks.calls import NOT_COMPARED, same_random_generators

NUM_STEPS = 3


class StateChecks(AlgorithmChecks):
    """Checks of what an algorithm keeps from step to step."""

    def _train(self, algorithm: Algorithm, first: int, last: int) -> list[tuple[list[list[str]], Learned]]:
        """Take steps as a run does, and return what each selected and learned."""
        results = []
        for number in range(first, last):
            rows = self._rows(number)
            chosen = {id(s) for group in groups_of([r.sample for r in rows]) for s in algorithm.select(group)}
            kept = [row for row in rows if id(row.sample) in chosen]
            advantages = algorithm.advantages(batch_of(kept, algorithm.needs))
            step = step_of(algorithm, kept, advantages)
            learned = learn(step, step.all_rows)
            names = [[str(index) for index, row in enumerate(rows) if id(row.sample) in chosen]]
            results.append((names, learned))
            loop = {"loss": float(learned.loss), "reward/mean": 0.5, "grad_norm": 1.0, "step": float(number + 1)}
            algorithm.after_step({**loop, **advantages.metrics, **learned.metrics, **learned.maxima, **learned.minima})
        return results

    def test_global_random_generators_are_left_alone(self) -> None:
        with same_random_generators("the algorithm"):
            try:
                self._train(self._ready(), 0, 1)
            except Exception:  # noqa: BLE001 - a check of its own
                pytest.skip(NOT_COMPARED)

    def test_the_state_is_plain(self) -> None:
        algorithm = self._ready()
        try:
            self._train(algorithm, 0, 1)
        except Exception:  # noqa: BLE001 - a check of its own
            pytest.skip(NOT_COMPARED)
        problem = _not_plain(algorithm.state_dict())
        assert not problem, f"state_dict() has {problem}: return numbers, text, and lists and dicts of them."

    def test_a_resumed_run_goes_on_as_it_would_have(self) -> None:
        went_on = self._ready()
        try:
            self._train(went_on, 0, NUM_STEPS)
        except Exception:  # noqa: BLE001 - a check of its own
            pytest.skip(NOT_COMPARED)
        state, resumed = went_on.state_dict(), self._ready()
        if _not_plain(state):
            pytest.skip(NOT_COMPARED)
        try:
            resumed.load_state_dict(state)
        except Exception as error:  # noqa: BLE001 - the algorithm's own
            pytest.fail(f"load_state_dict raised {describe(error)} with what state_dict returned.", pytrace=False)
        assert resumed.state_dict() == state, "state_dict() after load_state_dict is another one."
        expected = self._train(went_on, NUM_STEPS, 2 * NUM_STEPS)
        found = self._train(resumed, NUM_STEPS, 2 * NUM_STEPS)
        for (chosen, learned), (others, other) in zip(expected, found, strict=True):
            differs = "it selects other samples" if chosen != others else difference(other, learned, 0.0)
            assert not differs, (
                f"after {NUM_STEPS} steps and a resume from state_dict(), {differs}: what after_step or a call leaves "
                "behind belongs into state_dict, and from there into load_state_dict."
            )


# pytest runs the checks of base classes from the last to the first
class AlgorithmConformance(StateChecks, LossChecks, AdvantageChecks):
    """All checks of an algorithm, to subclass in a test module that returns it from ``make_algorithm``.

    They know no algorithm's equations: they compare an algorithm with itself, on other splits of the same completions
    over ranks and micro-batches, in another order, with other numbers where nothing trains, and after a resume. Numbers
    of its own belong into tests beside them. Everything is float32 on the CPU, and a class takes a second.

    Example::

        class TestMyAlgorithm(AlgorithmConformance):
            def make_algorithm(self) -> MyAlgorithm:
                return MyAlgorithm(clip=0.2)
    """


def _not_plain(value: Any) -> str:
    """Return what is neither number, text, list nor dict in a state, or nothing."""
    if value is None or isinstance(value, bool | int | float | str):
        return ""
    if isinstance(value, dict):
        keys = [repr(key) for key in value if not isinstance(key, str | int)]
        return f"the key {keys[0]}" if keys else next(filter(None, map(_not_plain, value.values())), "")
    if isinstance(value, list | tuple):
        return next(filter(None, map(_not_plain, value)), "")
    return f"a {'tensor' if isinstance(value, torch.Tensor) else type(value).__name__}"
