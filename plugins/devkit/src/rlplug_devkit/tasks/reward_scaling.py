"""Checks of rewards that scale: numbers of any round, the state, several ranks."""

from __future__ import annotations

import copy
import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import pytest

from rlplug.errors import brief, describe
from rlplug.interfaces.plain_values import MAX_REWARD
from rlplug.rewards.scores import own_copy
from rlplug.types import RewardError, Sample
from rlplug_devkit.tasks.reward_calls import RewardCallChecks
from rlplug_devkit.tasks.scoring import is_reward, same_values

NUM_RANKS: Final = 2


class RewardScalingChecks(RewardCallChecks):
    """Checks of ``scale``, and of the state that it keeps."""

    def expected_scaled(self) -> Sequence[Sequence[float]] | None:
        """Return what ``scale`` makes of the rewards of ``samples()`` in a first round, and of 10 x + 1 in a second.

        Without it, any finite numbers will do.
        """
        return None

    def test_scaled_values_are_numbers(self) -> None:
        """Each of a rank's samples has one, in every round: of no sample, of equal values, huge ones, and errors."""
        reward, samples = self._scaling()
        zero, equal, huge, failed = (
            [_valued(each, reward.name, value) for each in samples] for value in (0.0, 1.0, MAX_REWARD, None)
        )
        none: list[Sample] = []
        rounds = (samples, samples[:1], none, equal, huge, [failed[0], *samples[1:]], failed, samples)
        begun = self._ready()
        for scaled_by, some in [*((reward, some) for some in rounds), (begun, zero), (begun, samples)]:
            returned = self._scaled(scaled_by, some)
            what = f"scale of {len(some)} samples returned {brief(returned)}: return a finite number for each"
            assert len(returned) == len(some), f"{what}, whatever was scaled before."
            valid = [value for value, sample in zip(returned, some, strict=True) if not sample.errors]
            assert all(is_reward(value) for value in valid), f"{what} without an error."

    def test_scaled_values_are_the_expected_ones(self) -> None:
        expected = self.expected_scaled()
        if expected is None:
            pytest.skip("does not apply: expected_scaled returns None")
        assert self.make_reward().scales, "scales is False, and expected_scaled has values: claim what scale does."
        reward, samples = self._scaling()
        found = [self._scaled(reward, some) for some in (samples, self._of_other_values(reward, samples))]
        is_same = all(same_values(*both) for both in zip(found, expected, strict=True))
        assert is_same, f"in two rounds, scale returned {found}, and expected is {expected}."

    def test_scaling_compares_groups_as_it_claims(self) -> None:
        """What a run needs of groups, such as several samples of a prompt, it asks ``scales_group``."""
        reward, samples = self._scaling()
        four = [_valued(samples[i % len(samples)], reward.name, value) for i, value in enumerate((1.0, 2.0, 4.0, 8.0))]
        found = []
        for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
            some = [dataclasses.replace(four[place], group=index // 2) for index, place in enumerate(order)]
            found.append(dict(zip(order, self._scaled(self._ready(), some), strict=True)))
        depends = not same_values(*([values[place] for place in range(4)] for values in found))
        assert depends == reward.scales_group, (
            f"scales_group is {reward.scales_group}, and it is {depends} that values depend on which samples are of "
            "one prompt: claim what scale does."
        )

    def test_scaling_goes_on_from_its_state(self) -> None:
        reward, samples = self._scaling()
        self._scaled(reward, self._of_other_values(reward, samples))
        parts = [_valued(each, reward.name, 17.37 + 1.13 * place) for place, each in enumerate(samples)]
        self._scaled(reward, parts)  # a state of whole numbers would lose what these add
        state = json.loads(json.dumps(reward.state_dict()))
        again: Any = self._ready()
        again.load_state_dict(state)
        expected, found = self._scaled(reward, samples), self._scaled(again, samples)
        assert same_values(expected, found), (
            f"after a resume scale returned {found} instead of {expected}: state_dict must hold, as plain data, what "
            "scale keeps between rounds, and load_state_dict restore all of it."
        )

    def test_an_undone_step_leaves_no_trace_in_scaling(self) -> None:
        """The state of before a step is restored when the step is undone; what it returned must not have moved."""
        reward, samples = self._scaling()
        self._scaled(reward, samples)
        state = reward.state_dict()
        kept = copy.deepcopy(state)
        expected = self._scaled(reward, samples)
        self._scaled(reward, self._of_other_values(reward, samples))
        assert state == kept, f"scale changes what state_dict returned before, {kept}: return a copy."
        reward.load_state_dict(state)
        found = self._scaled(reward, samples)
        assert same_values(expected, found), f"with the state of before a step, scale returned {found}, not {expected}."

    def test_errors_do_not_count_in_scaling(self) -> None:
        """A reward that failed is no 0: others are scaled as without its sample, in later rounds too."""
        self._skip_after_failure()
        reward, samples = self._scaling()
        failed = _valued(samples[0], reward.name, None)
        beside, without = self._ready(), self._ready()
        found = self._scaled(beside, [failed, *samples[1:]])[1:] + self._scaled(beside, samples)
        expected = self._scaled(without, samples[1:]) + self._scaled(without, samples)
        assert same_values(found, expected), (
            f"beside a sample with an error, two rounds scale to {found}, and to {expected} without it: leave samples "
            "with errors out of means, extremes and counts."
        )

    def test_scaling_leaves_samples_alone(self) -> None:
        reward, samples = self._scaling()
        before = [dict(sample.rewards) for sample in samples]
        list(reward.scale(samples, lambda array: array))
        assert before == [dict(sample.rewards) for sample in samples], "scale changes the rewards of its samples."

    def test_ranks_scale_as_one(self) -> None:
        """Groups are on several ranks, and a rank may have none: values and state are those of one rank with all."""
        alone, samples = self._scaling()
        others = [dataclasses.replace(each, group=1) for each in self._of_other_values(alone, samples)]
        expected = [*self._scaled(alone, [*samples, *others]), *self._scaled(alone, samples)]
        ranks, gathered = [self._ready() for _ in range(NUM_RANKS)], _Gathered()

        def run(rank: int) -> list[float]:
            first = self._scaled(ranks[rank], (samples, others)[rank], gathered.of(rank))
            return [*first, *self._scaled(ranks[rank], (samples, [])[rank], gathered.of(rank))]

        with ThreadPoolExecutor(NUM_RANKS) as threads:
            try:
                first, second = threads.map(run, range(NUM_RANKS))
            except threading.BrokenBarrierError:
                pytest.fail("ranks call gather_arrays a different number of times: each calls it alike.", pytrace=False)
            except Exception as error:  # noqa: BLE001 - the reward's own
                pytest.fail(f"scale on a rank without samples raised {describe(error)}", pytrace=False)
        found = [*first[: len(samples)], *second, *first[len(samples) :]]
        assert same_values(expected, found), f"two ranks scale to {found}, and one with all samples to {expected}."
        states: list[Any] = [rank.state_dict() for rank in ranks]  # type: ignore[attr-defined]
        assert states[0] == states[1], f"the ranks' states differ, {states}: keep what all ranks have gathered."

    def _scaled(
        self, reward: Any, samples: Sequence[Sample], gather: Callable[[Any], Any] = lambda array: array
    ) -> list[float]:
        with self._guard().around("scale"):
            return list(reward.scale([own_copy(sample) for sample in samples], gather))

    def _scaling(self) -> tuple[Any, list[Sample]]:
        """Return a reward that scales, and scored samples of one group; skip the check for others."""
        reward = self._ready()
        if not reward.scales:
            pytest.skip("does not apply: scales is False")
        samples = self.samples()
        (values,) = self._values(reward, samples)
        return reward, [_valued(each, reward.name, value) for each, value in zip(samples, values, strict=True)]

    def _of_other_values(self, reward: Any, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with other values, so that what is kept of them shows."""
        values = [sample.rewards[reward.name] for sample in samples]
        others = [None if isinstance(value, RewardError) else 10 * value + 1 for value in values]
        return [_valued(each, reward.name, value) for each, value in zip(samples, others, strict=True)]


class _Gathered:
    """Arrays of ranks that are threads."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(NUM_RANKS, timeout=10.0)
        self._arrays: list[Any] = [None] * NUM_RANKS

    def of(self, rank: int) -> Callable[[Any], Any]:
        """Return ``gather_arrays`` of a rank."""

        def gather(array: Any) -> Any:
            self._arrays[rank] = np.asarray(array)
            self._barrier.wait()
            found = np.concatenate(self._arrays)
            self._barrier.wait()
            return found

        return gather


def _valued(sample: Sample, name: str, value: float | None) -> Sample:
    return dataclasses.replace(sample, rewards={name: RewardError("failed") if value is None else value})
