"""Conformance kit of rewards: the checks that a reward must pass, from general to special."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import ClassVar

import pytest

from rlplug.errors import brief
from rlplug.interfaces.reward import Reward
from rlplug.rewards.function import FunctionReward
from rlplug.types import RewardError, Sample
from rlplug_devkit.tasks.calls import HOSTILE, NUM_THREADS, eager_threads, same_random_generators
from rlplug_devkit.tasks.exploits import exploits_of
from rlplug_devkit.tasks.likenesses import asked_otherwise, likenesses
from rlplug_devkit.tasks.reward_scaling import RewardScalingChecks
from rlplug_devkit.tasks.scoring import Values, interrupting, is_reward, same_values, with_answer, with_completion
from rlplug_devkit.tasks.scoring import make_sample as make_sample


class RewardConformance(RewardScalingChecks):
    """Checks of a reward. A subclass must override ``make_reward``, and may override the rest.

    Attributes:
        is_deterministic: Whether the same sample always has the same reward. False for a judge that samples.
    """

    is_deterministic: ClassVar[bool] = True

    def _needs_repetition(self) -> None:
        """Skip a comparison of calls where they need not repeat, or where an earlier check has failed."""
        if not self.is_deterministic:
            pytest.skip("does not apply: is_deterministic is False")
        self._skip_after_failure()

    # ---- what a reward depends on ---------------------------------------------------------------------------------

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
        alone = [value for sample in samples for (value,) in self._values(reward, [sample])]
        assert same_values(together, alone), f"alone samples got {alone}, and in one call {together}: score each alone."

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

    # ---- what a policy may write ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("what", HOSTILE)
    def test_any_text_gets_a_number_or_an_error(self, what: str) -> None:
        sample = self.samples()[0]
        made = make_sample(HOSTILE[what], sample.prompt.answer, sample.prompt.text, **sample.prompt.metadata)
        ((call,),) = self._score(self._ready(), [made])
        advice = "Score what is malformed with a low reward, or return a RewardError: a policy writes anything."
        assert not call.error, f"a completion of {what}: score {call.error}. {advice}"
        for value in call.value if isinstance(call.value, list) else ():
            assert isinstance(value, RewardError) or is_reward(value), f"{what} got {brief(value)}. {advice}"

    def test_completions_that_solve_nothing_do_not_pay(self) -> None:
        """A policy finds each that scores like a right answer: nothing, the prompt again, every answer at once ..."""
        self._needs_repetition()
        reward = self._ready()
        if not reward.needs_answer or reward.compares_group:
            pytest.skip("does not apply: needs_answer is False, or compares_group is True")
        solved, value = self._solved(reward)
        for what, text in exploits_of(solved.prompt).items():
            ((found,),) = self._values(reward, [with_completion(solved, text)])
            assert found is None or found < value, (
                f"{what}, {brief(text)}, scores {found:g}, and {brief(solved.completion)}, which has the answer, "
                f"{value:g}: a policy writes that soon, and learns nothing else. Look for one answer, in one place."
            )

    def _solved(self, reward: Reward) -> tuple[Sample, float]:
        """Return the sample with the highest reward of those that gain by their prompt's answer, and the reward."""
        samples = self.samples()
        own, other = self._values(reward, samples, self._with_other_answers(samples))
        least = min((value for value in own if value is not None), default=0.0)
        gains = [
            (value, place)
            for place, (value, without) in enumerate(zip(own, other, strict=True))
            if value is not None and value > least and (without is None or without < value)
        ]
        if not gains:
            pytest.skip("does not apply: no sample scores more with its prompt's answer than with another")
        value, place = max(gains)
        return samples[place], value

    def test_a_prompt_without_an_answer_gets_a_number_or_an_error(self) -> None:
        reward, sample = self._ready(), self.samples()[0]
        if reward.needs_answer:
            pytest.skip("does not apply: needs_answer is True")
        ((call,),) = self._score(reward, [make_sample(sample.completion, None, sample.prompt.text)])
        assert not call.error, (
            f"a prompt without answer and metadata: score {call.error}. Return a RewardError that names the field "
            "which the reward needs: a file of prompts may lack it. Or claim needs_answer."
        )

    def test_a_missing_answer_is_no_value(self) -> None:
        """A comparison with nothing is false for every completion, and all prompts without answers then train."""
        self._needs_repetition()
        reward, samples = self._ready(), self.samples()
        if isinstance(reward, FunctionReward):
            pytest.skip("does not apply: it is a plain function")
        others = self._with_other_answers(samples)
        values, changed = self._values(reward, samples, others)
        if reward.needs_answer or reward.compares_group or same_values(values, changed):
            pytest.skip("does not apply: needs_answer or compares_group is True, or rewards do not depend on answers")
        (found,) = self._values(reward, [with_answer(each, None) for each in samples])
        assert len({*found}) > 1 or found[0] is None, (
            f"without an answer every sample gets {found[0]:g}, and with one they differ: return a RewardError where "
            "there is nothing to compare with, or claim needs_answer, which refuses such prompts."
        )

    def test_answers_of_other_kinds_are_scored_or_refused(self) -> None:
        """A file has numbers and lists beside texts. A plain function refuses nothing, and says which it takes."""
        if isinstance(self.make_reward(), FunctionReward):
            pytest.skip("does not apply: it is a plain function")
        self._skip_after_failure()
        sample = self.samples()[0]
        for answer in (4, ["4"]):
            made, reward = with_answer(sample, answer), self._ready()
            if not self._is_refused(reward, made.prompt):
                ((call,),) = self._score(reward, [made])
                assert not call.error, (
                    f"the answer {answer!r}: score {call.error}. Refuse it in check_prompts by the prompt's uid, or "
                    "return a RewardError that says what the answer has to be."
                )

    def test_cut_samples_and_several_turns_are_scored(self) -> None:
        """A limit of tokens cuts completions, and an environment answers between turns."""
        self._skip_after_failure()
        sample = self.samples()[0]
        cut = dataclasses.replace(sample, finish_reason="length")
        for what, made in (("cut", cut), ("of two turns", dataclasses.replace(cut, last_turn=sample.completion[-1:]))):
            ((call,),) = self._score(self._ready(), [made])
            assert not call.error, f"a sample that is {what}: score {call.error}. Score every sample of a run."

    # ---- what calls change, and leave behind ----------------------------------------------------------------------

    def test_calls_leave_nothing_behind(self) -> None:
        reward = self._ready()
        self._require_nothing_left("a call of score", lambda: self._score(reward, self.samples()[:1]))

    def test_the_process_is_left_as_it_was(self) -> None:
        """Also by a first call, in an earlier check: a change that is made once is there in all later ones."""
        self._score(self._ready(), self.samples())
        self._require_unchanged_process("a reward")
