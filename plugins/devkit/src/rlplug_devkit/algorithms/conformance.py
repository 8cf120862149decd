"""``AlgorithmConformance``: checks that every algorithm must pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rlplug.errors import describe
from rlplug.interfaces.algorithm import Algorithm
from rlplug_devkit.algorithms.advantages import AdvantageChecks
from rlplug_devkit.algorithms.checks import AlgorithmChecks
from rlplug_devkit.algorithms.claimed import ClaimChecks
from rlplug_devkit.algorithms.directions import DirectionChecks
from rlplug_devkit.algorithms.examples import ExampleChecks
from rlplug_devkit.algorithms.losses import LossChecks
from rlplug_devkit.algorithms.passes import Learned
from rlplug_devkit.algorithms.plays import PlayChecks
from rlplug_devkit.algorithms.repeats import RepeatChecks
from rlplug_devkit.algorithms.runs import RunChecks
from rlplug_devkit.algorithms.steps import batch_of
from rlplug_devkit.algorithms.training import metrics_of_step, train, trained_otherwise
from rlplug_devkit.process_checks import ProcessChecks
from rlplug_devkit.tasks.calls import NOT_COMPARED, same_random_generators

NUM_STEPS = 3
NUM_OBSERVED = 300
"""Steps of which an algorithm sees the metrics, before a late resume."""


class StateChecks(AlgorithmChecks):
    """Checks of what an algorithm keeps from step to step."""

    def _train(self, algorithm: Algorithm, first: int, last: int) -> list[tuple[list[str], Learned]]:
        return train(algorithm, self.run, first, last)

    def test_steps_of_a_run_can_be_taken(self) -> None:
        try:
            self._train(self._ready(), 0, NUM_STEPS)
        except Exception as error:  # noqa: BLE001 - the algorithm's own
            pytest.fail(
                f"in {NUM_STEPS} steps select, advantages, a loss or after_step raised {describe(error)}.",
                pytrace=False,
            )

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
        differs = trained_otherwise(found, expected, 0.0)
        assert not differs, (
            f"after {NUM_STEPS} steps and a resume from state_dict(), {differs}: what after_step or a call leaves "
            "behind belongs into state_dict, and from there into load_state_dict."
        )

    def test_a_late_resume_goes_on_as_it_would_have(self) -> None:
        """Schedules and warm-ups end: after so many steps that what counts them matters; averages rise and fall."""
        for reward in (0.5, 0.0, 1.0):
            self._require_late_resume(reward)

    def _require_late_resume(self, reward: float) -> None:
        went_on, resumed = self._ready(), self._ready()
        learned = self._train(went_on, 0, 1)[0][1]
        batch = batch_of(self._rows(), went_on.needs)
        metrics = metrics_of_step(0, went_on.advantages(batch), learned)
        for number in range(NUM_OBSERVED):
            went_on.after_step({**metrics, "reward/mean": reward, "step": float(number + 2)})
        resumed.load_state_dict(copy.deepcopy(went_on.state_dict()))
        expected, found = (self._train(each, 1, 3) for each in (went_on, resumed))
        differs = trained_otherwise(found, expected, 0.0)
        assert not differs, (
            f"after {NUM_OBSERVED} steps and a resume from state_dict(), {differs}: a number that counts steps belongs "
            "into state_dict too."
        )

    def test_the_state_is_of_its_moment(self) -> None:
        """A checkpoint is written while the run goes on, and the same state may be loaded twice."""
        algorithm, resumed = self._ready(), self._ready()
        self._train(algorithm, 0, 1)
        state = algorithm.state_dict()
        kept = copy.deepcopy(state)
        self._train(algorithm, 1, 2)
        assert state == kept, "later steps change the dict that state_dict returned: return copies of lists and dicts."
        resumed.load_state_dict(state)
        self._train(resumed, 1, 3)
        assert state == kept, "steps after load_state_dict change the dict that it got: copy lists and dicts."


# pytest runs the checks of base classes from the last to the first
class AlgorithmConformance(
    PlayChecks,
    ProcessChecks,
    ExampleChecks,
    DirectionChecks,
    RunChecks,
    RepeatChecks,
    ClaimChecks,
    StateChecks,
    LossChecks,
    AdvantageChecks,
):
    """All checks of an algorithm, to subclass in a test module that returns it from ``make_algorithm``.

    They compare an algorithm with itself, on other splits of the same completions over ranks and micro-batches, in
    another order, with other numbers where nothing trains, and after a resume. Its equations they know by ``examples``
    alone, which an author works out. Everything is float32 on the CPU, and a class takes a second.

    Example::

        class TestMyAlgorithm(AlgorithmConformance):
            def make_algorithm(self) -> MyAlgorithm:
                return MyAlgorithm(clip=0.2)

            def examples(self) -> list[WorkedExample]:
                right, wrong = Completion(1.0, [-1.0], [-1.5]), Completion(0.0, [-2.0, -1.0], [-2.0, -1.0])
                # the ratio of the first token is cut at 1.2
                return [WorkedExample([right, wrong], advantages=[0.5, -0.5], loss=(0.5 + 0.5 - 1.2 * 0.5) / 3)]
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
