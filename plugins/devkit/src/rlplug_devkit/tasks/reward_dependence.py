"""Checks of what a reward may depend on: its sample, and neither other calls, nor the batch, nor the process."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from itertools import cycle
from typing import ClassVar, Final

import pytest

from rlplug.interfaces.reward import Reward
from rlplug.rewards.function import FunctionReward
from rlplug.types import Sample
from rlplug_devkit.tasks.calls import NUM_THREADS, eager_threads, same_random_generators
from rlplug_devkit.tasks.likenesses import MIDDLE, asked_otherwise, likenesses
from rlplug_devkit.tasks.reward_scaling import RewardScalingChecks
from rlplug_devkit.tasks.scoring import Values, interrupting, is_reward, same_values, with_answer, with_completion

MOST_BESIDE: Final = 8
"""Most samples of a call with long ones."""


class RewardDependenceChecks(RewardScalingChecks):
    """Checks of the same samples in other calls.

    Attributes:
        is_deterministic: Whether the same sample always has the same reward. False for a judge that samples.
    """

    is_deterministic: ClassVar[bool] = True

    def _needs_repetition(self) -> None:
        """Skip a comparison of calls where they need not repeat, or where an earlier check has failed."""
        if not self.is_deterministic:
            pytest.skip("does not apply: is_deterministic is False")
        self._skip_after_failure()

    def test_rewards_repeat(self) -> None:
        self._needs_repetition()
        reward = self._ready()
        (first,), (again,) = self._values(reward, self.samples()), self._values(reward, self.samples())
        (other,) = self._values(self._ready(), self.samples())
        advice = "A resumed run would train on others. Keep no state between calls, and seed what is random."
        assert same_values(first, again), f"the same samples got {first}, and then {again}. {advice}"
        assert same_values(first, other), f"the same samples got {first}, and of a second object {other}. {advice}"

    def test_another_process_scores_alike(self) -> None:
        """Each rank is a process, and so is the run that resumes: texts have other hashes there."""
        self._needs_repetition()
        here, (_, there) = self._scored(), self._of_another_process("_scored_later")
        assert same_values(here, there), (
            f"another process scored {there} instead of {here}: so would another rank, and a resumed run. Sort sets, "
            "call no hash() or id(), and let no order of calls decide."
        )

    def _scored_later(self) -> tuple[Values | str, Values]:
        """Return the values of calls at once for other tasks, which came last here, and then those of the samples."""
        first: Values | str
        try:
            first = self._at_once(self._ready(), asked_otherwise(self.samples()))
        except pytest.fail.Exception as problem:
            first = str(problem)
        self._score(self._ready(), self._with_other_answers(self.samples())[::-1])
        return first, self._scored()

    def _at_once(self, reward: Reward, samples: Sequence[Sample]) -> Values:
        """Return the values of many calls that meet: of each sample, or of the group, again and again."""
        calls = [samples] if reward.compares_group else [[sample] for sample in samples]
        with eager_threads():
            found = self._values(reward, *calls * NUM_THREADS, make=interrupting)
        return [value for values in found for value in values]

    def _scored(self) -> Values:
        """Return the values of the samples."""
        return self._values(self._ready(), self.samples())[0]

    def test_what_was_scored_before_changes_nothing(self) -> None:
        """Of other tasks, and of completions that differ in a part, as the key of a cache may leave it out."""
        self._needs_repetition()
        batches = likenesses(self.samples(), self._with_other_answers(self.samples()))
        used, other = self._ready(), self._ready()
        first = [self._values(used, batch)[0] for batch in batches]
        backwards = [self._values(other, batch)[0] for batch in batches[::-1]][::-1]
        for found, expected in zip(first, backwards, strict=True):
            assert same_values(found, expected), (
                f"samples got {found}, and {expected} where others like them were scored after them and not before: "
                "keep no state, and let the key of a cache have all that a reward depends on."
            )

    def test_prompts_that_were_never_checked_score_alike(self) -> None:
        """Of a streamed source ``check_prompts`` gets the first ones alone."""
        self._needs_repetition()
        samples = asked_otherwise(self.samples())
        reward = self._ready([each.prompt for each in self.samples()])
        (found,), (expected,) = self._values(reward, samples), self._values(self._ready(), samples)
        assert same_values(found, expected), (
            f"samples got {found} where check_prompts had seen other prompts, and {expected} where it was not called: "
            "read what scoring needs from each sample's prompt."
        )

    def test_rewards_do_not_depend_on_the_batch(self) -> None:
        """A sample's reward is its own, whatever else is in the call, in which order, and as which group of a step.

        Of a reward that compares a group, it is the sample's also in another order.
        """
        self._needs_repetition()
        reward, samples = self._ready(), self.samples()
        is_whole = reward.compares_group or not self._score(reward, samples, whole=True)[0][0].error
        (together,) = self._values(reward, samples, whole=is_whole)
        (backwards,) = self._values(reward, samples[::-1], whole=is_whole)
        assert same_values(together, backwards[::-1]), (
            f"samples in another order got {backwards[::-1]} instead of {together}: return values in the order of "
            "the samples, and score each by itself. A judge that compares a group sees each pair in both orders."
        )
        moved = [dataclasses.replace(each, group=each.group + 1001, policy_version=7) for each in samples]
        (elsewhere,) = self._values(reward, moved, whole=is_whole)
        assert same_values(together, elsewhere), (
            f"as another group of another step samples got {elsewhere} instead of {together}: score what was written, "
            "not the number of its group or of the policy's version."
        )
        if reward.compares_group:
            return
        (twice,) = self._values(reward, [*samples, *samples], whole=is_whole)
        assert same_values([*together, *together], twice), (
            f"twice in one call samples got {twice}, and once {together}: score each alone, or claim compares_group."
        )
        alone = [value for sample in samples for (value,) in self._values(reward, [sample])]
        assert same_values(together, alone), f"alone samples got {alone}, and in one call {together}: score each alone."
        self._require_apart(reward, samples, together)

    def _require_apart(self, reward: Reward, samples: Sequence[Sample], values: Values) -> None:
        """Fail where samples get other values in a call with the same completions of other tasks, or with long ones."""
        others = {
            "the same completion with other answers": self._with_other_answers(samples),
            "the same completion with other prompts": asked_otherwise(samples),
        }
        for what, alike in others.items():
            for place, sample in enumerate(samples):
                self._require_value(reward, [alike[place]], sample, values[place], what)
        for place, sample in enumerate(samples if reward.batch_size > 1 else ()):
            long = [with_completion(each, MIDDLE * 4) for each in samples]
            beside = [
                each for _, each in zip(range(min(reward.batch_size, MOST_BESIDE) - 1), cycle(long), strict=False)
            ]
            self._require_value(reward, beside, sample, values[place], "long completions")

    def _require_value(
        self, reward: Reward, beside: Sequence[Sample], sample: Sample, value: float | None, what: str
    ) -> None:
        """Fail where a sample has another value before or behind others, in one call."""
        for batch, own in (([sample, *beside], 0), ([*beside, sample], -1)):
            ((call,),) = self._score(reward, batch, whole=True)
            if call.error or not isinstance(call.value, list) or len(call.value) != len(batch):
                continue  # a batch of a size or of answers that it does not take
            found = call.value[own] if is_reward(call.value[own]) else None
            assert same_values([found], [value]), (
                f"beside {what}, in one call, a sample got {found}, and alone {value}: score each by itself, also "
                "where completions are equal, or long."
            )

    def test_concurrent_calls_do_not_mix(self) -> None:
        """A run scores many samples at once; what one call keeps in ``self``, another overwrites."""
        self._needs_repetition()
        reward, samples = self._ready(), self.samples()
        calls = [samples] if reward.compares_group else [[sample] for sample in samples]
        alone = [value for call in calls for value in self._values(reward, call)[0]]
        together = self._at_once(reward, samples)
        assert same_values(together, alone * NUM_THREADS), (
            f"calls at the same time got {together[: len(alone)]}, and one after the other {alone}: keep what belongs "
            "to a call in local variables."
        )

    def test_first_calls_at_once_score_alike(self) -> None:
        """A run's first calls meet, in a process where nothing was called before."""
        self._needs_repetition()
        first, _ = self._of_another_process("_scored_later")
        (alone,) = self._values(self._ready(), asked_otherwise(self.samples()))
        is_text = isinstance(first, str)
        assert not is_text and same_values(first, alone * NUM_THREADS), (  # noqa: PT018 - one message
            f"the first calls of a process, made at once, got {first if is_text else first[: len(alone)]} instead of "
            f"{alone}: fill what calls read in notes, or under a lock."
        )

    def test_a_pickled_reward_scores_alike(self) -> None:
        """Workers of plugins get rewards so; one that cannot be pickled is passed over."""
        self._needs_repetition()
        reward = self._ready()
        try:
            again = pickle.loads(pickle.dumps(reward))
        except Exception as error:  # noqa: BLE001 - whatever it raises, it says that it cannot
            pytest.skip(f"does not apply: the reward cannot be pickled ({type(error).__name__})")
        (expected,), (found,) = self._values(reward, self.samples()), self._values(again, self.samples())
        assert same_values(expected, found), (
            f"after a pickle samples got {found} instead of {expected}: keep what scoring reads in attributes of the "
            "object, or refuse to be pickled."
        )

    def test_values_are_not_weighted(self) -> None:
        """The run multiplies by ``weight``, and logs what ``score`` returns."""
        self._needs_repetition()
        reward, heavy = self._ready(), self._ready()
        try:
            object.__setattr__(heavy, "weight", 3.0 * reward.weight + 1.0)
        except AttributeError:
            pytest.skip("does not apply: weight cannot be set")
        (values,), (weighted,) = self._values(reward, self.samples()), self._values(heavy, self.samples())
        assert same_values(values, weighted), f"another weight changes {values} to {weighted}: leave it to the run."

    def test_global_random_generators_are_left_alone(self) -> None:
        with same_random_generators("the reward"):
            self._score(self._ready(), self.samples())

    def test_odd_samples_do_not_get_what_others_got(self) -> None:
        """One that is cut, empty or without an answer may pass by what sets a value, which is then the last one's."""
        self._needs_repetition()
        samples = self.samples()
        values = self._values(self._ready(), samples)[0]
        places = sorted((value, place) for place, value in enumerate(values) if value is not None)
        if self._ready().compares_group or len({value for value, _ in places}) < 2:
            pytest.skip("does not apply: compares_group is True, or samples have no different rewards")
        low, high = samples[places[0][1]], samples[places[-1][1]]
        odd = {"cut": dataclasses.replace(low, finish_reason="length"), "empty": with_completion(low, "")}
        if not (isinstance(self.make_reward(), FunctionReward) or self.make_reward().needs_answer):
            odd["without an answer"] = with_answer(low, None)
        for what, made in odd.items():
            reward = self._ready()
            _, (after_low,), _, (after_high,) = self._score(reward, [low], [made], [high], [made])
            if after_low.error or after_high.error:
                continue
            found = [[each if is_reward(each) else None for each in call.value] for call in (after_low, after_high)]
            assert same_values(*found), (
                f"a sample that is {what} got {found[0]} after one of the lowest reward, and {found[1]} after one of "
                "the highest: keep no value of another sample."
            )
