"""Checks of what a policy may write, and of the answers that prompts may have."""

from __future__ import annotations

import dataclasses
import math
from typing import Final

import pytest

from rlplug.errors import brief
from rlplug.interfaces.plain_values import as_reward
from rlplug.interfaces.reward import Reward
from rlplug.rewards.function import FunctionReward
from rlplug.types import RewardError, Sample
from rlplug_devkit.tasks.calls import HOSTILE
from rlplug_devkit.tasks.exploits import exploits_of
from rlplug_devkit.tasks.outage import outage
from rlplug_devkit.tasks.reward_calls import NUM_TIMED
from rlplug_devkit.tasks.reward_dependence import RewardDependenceChecks
from rlplug_devkit.tasks.scoring import is_reward, make_sample, same_values, with_answer, with_completion, without_field

OTHER_SCRIPTS: Final = (("東京", "大阪"), ("ありがとう", "さようなら"), ("\U0001f408", "\U0001f415"))
"""Answers, each with another one that is as long."""
RUNS: Final = (("", "a"), ("", "1"), ("", " "), ("", "a "), ("<answer>", "a"), ("\\boxed{", "1"))
"""What a policy repeats, behind what it begins with."""
SIZES: Final = (6, 10, 14, 18, 22)
"""Characters of a repetition: at the first size an exponential time is still short."""
SLOW_S: Final = 0.1
GROWTH: Final = 5.0
"""Growth of time from one of ``SIZES`` to the next that no ordinary call has."""


class RewardTextChecks(RewardDependenceChecks):
    """Checks of completions and answers of all kinds."""

    def test_time_does_not_explode_with_the_length(self) -> None:
        """A regular expression of repetitions within repetitions takes exponential time where it does not match.

        It holds the interpreter's lock, so that no deadline ends it: this comes before long texts.
        """
        reward, sample = self._ready(), self.samples()[0]
        for before, run in RUNS:
            times = [math.inf, math.inf]
            for size in SIZES:
                made = with_completion(sample, f"{before}{run * (size // len(run))}!")
                grew = times[-1] >= GROWTH * times[-2]  # once is no proof: a judge may not be asked about short texts
                most_s = max(SLOW_S, GROWTH * times[-1]) if grew else math.inf
                times.append(self._fastest(reward, made, most_s))
                assert times[-1] < most_s, (
                    f"the completion {brief(made.completion)} takes {times[-1]:.2g} s, and with {SIZES[1] - SIZES[0]} "
                    f"characters less each, others take {times[-2]:.2g} s and {times[-3]:.2g} s: a policy that repeats "
                    "itself stops the run, for a regular expression holds the interpreter's lock. Let no part of a "
                    "pattern that is repeated have repetitions of its own that match the same."
                )

    def _fastest(self, reward: Reward, sample: Sample, most_s: float) -> float:
        """Return the seconds of a call; of the fastest of some where it took ``most_s`` or more."""
        seconds = math.inf
        for _ in range(NUM_TIMED):
            ((call,),) = self._score(reward, [sample])
            seconds = min(seconds, call.seconds)
            if seconds < most_s:
                break
        return seconds

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

    def test_answers_in_other_scripts_are_told_apart(self) -> None:
        """What ASCII has of such an answer is nothing, and nothing equals nothing. Of rewards that compare texts."""
        self._needs_repetition()
        reward = self._ready()
        if reward.compares_group:
            pytest.skip("does not apply: compares_group is True")
        solved, value = self._solved(reward)
        answer, is_compared = str(solved.prompt.answer), False
        for right, wrong in (("ab", "cd"), *OTHER_SCRIPTS):
            prompt = with_answer(solved, right).prompt
            if self._is_refused(reward, prompt):
                continue
            texts = [solved.completion.replace(answer, each) for each in (right, wrong)]
            samples = [with_completion(with_answer(solved, right), text) for text in texts]
            ((own,), (other,)) = self._score(reward, samples[:1], samples[1:])
            found = [call.value[0] if isinstance(call.value, list) else None for call in (own, other)]
            if not (is_reward(found[0]) and is_reward(found[1])):
                continue
            is_apart = as_reward(found[1]) < as_reward(found[0])
            if right.isascii():
                is_compared = is_apart
            elif is_compared and as_reward(found[0]) == value:
                assert is_apart, (
                    f"{brief(texts[1])} scores {found[1]:g} where the answer is {right!r}, as {brief(texts[0])} does: "
                    "compare texts as they are, and encode them as UTF-8 where they must be bytes."
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

    def test_a_missing_field_is_no_value(self) -> None:
        """All of no tests pass: a row without a field that decides rewards would train on the same number.

        A field that one of the samples lacks may be left out.
        """
        self._needs_repetition()
        reward, samples = self._ready(), self.samples()
        fields = sorted(set.intersection(*({*sample.prompt.metadata} for sample in samples)))
        if isinstance(reward, FunctionReward) or reward.compares_group or not fields:
            pytest.skip("does not apply: a plain function, compares_group is True, or samples share no metadata")
        (values,) = self._values(reward, samples)
        for field in fields:
            others = [without_field(sample, field) for sample in samples]
            (calls,) = self._score(self._ready(), others)
            found = [value for call in calls if not call.error for value in call.value]
            is_one = len(found) == len(values) and all(map(is_reward, found)) and len({*found}) == 1
            assert not is_one or len({*values}) == 1, (
                f"without {field!r} in the metadata every sample gets {found[0]:g}, and with it they differ: return a "
                "RewardError, as check_prompts gets the first prompts of a streamed source alone. Where it may be left "
                "out, give a sample that lacks it."
            )

    def test_answers_of_other_kinds_are_scored_or_refused(self) -> None:
        """A file has numbers and lists beside texts. A plain function refuses nothing, and says which it takes."""
        if isinstance(self.make_reward(), FunctionReward):
            pytest.skip("does not apply: it is a plain function")
        self._skip_after_failure()
        sample = self.samples()[0]
        scored: dict[str, bool] = {}
        for answer in (4, ["4"], 0):
            made, reward = with_answer(sample, answer), self._ready()
            if not self._is_refused(reward, made.prompt):
                ((call,),) = self._score(reward, [made])
                assert not call.error, (
                    f"the answer {answer!r}: score {call.error}. Refuse it in check_prompts by the prompt's uid, or "
                    "return a RewardError that says what the answer has to be."
                )
                scored[repr(answer)] = isinstance(call.value, list) and all(map(is_reward, call.value))
        assert scored.get("0", True) or not scored.get("4"), (
            "the answer 4 is scored, and 0 is an error: compare with None to find out whether there is an answer."
        )

    def test_cut_samples_and_several_turns_are_scored(self) -> None:
        """A limit of tokens cuts completions, and an environment answers between turns."""
        self._skip_after_failure()
        sample = self.samples()[0]
        cut = dataclasses.replace(sample, finish_reason="length")
        for what, made in (("cut", cut), ("of two turns", dataclasses.replace(cut, last_turn=sample.completion[-1:]))):
            ((call,),) = self._score(self._ready(), [made])
            assert not call.error, f"a sample that is {what}: score {call.error}. Score every sample of a run."

    def test_what_cannot_be_reached_is_an_error(self) -> None:
        """A judge that is away: with 0 in place of an error a run trains on its outages."""
        self._skip_after_failure()
        reward = self._ready()
        with outage() as asked:
            (calls,) = self._score(reward, self.samples())
        if not asked:
            pytest.skip("does not apply: it asks nobody over a network")
        found = [
            value for call in calls if not call.error for value in call.value if not isinstance(value, RewardError)
        ]
        assert not found, f"a sample gets {found[0]!r} while {asked[0]} cannot be reached: return a RewardError."
