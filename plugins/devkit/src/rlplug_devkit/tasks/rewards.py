"""Conformance kit of rewards: the checks that a reward must pass, from general to special."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pickle
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from rlplug.errors import ConfigError, RunError, brief
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.metrics import read_metrics
from rlplug.interfaces.plain_values import as_reward
from rlplug.interfaces.reward import Reward
from rlplug.rewards.runner import RewardRunner
from rlplug.rewards.scores import own_copy
from rlplug.timeouts import Call, CallError
from rlplug.types import Prompt, RewardError, Sample
from rlplug_devkit.process_state import changes_since, process_state
from rlplug_devkit.tasks.calls import HOSTILE, NOT_COMPARED, NUM_THREADS, TaskChecks, run_calls, same_random_generators


def make_sample(completion: str, answer: Any = None, prompt: str = "2+2=", **metadata: Any) -> Sample:
    """Return a finished sample of one turn, with a token for each character.

    Args:
        completion: Text of the completion.
        answer: The prompt's reference answer.
        prompt: Text of the prompt.
        metadata: The prompt's other fields.
    """
    tokens = np.array([ord(character) % 1000 for character in prompt + completion], np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    return Sample(
        prompt=Prompt("made-up:1", tuple(tokens[: len(prompt)].tolist()), prompt, answer, metadata),
        group=0,
        token_ids=tokens,
        response_mask=mask,
        rollout_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        completion=completion,
        finish_reason="stop",
        policy_version=0,
        last_turn=completion,
    )


class RewardConformance(TaskChecks):
    """Checks of a reward. A subclass must override ``make_reward``, and may override the rest.

    Attributes:
        is_deterministic: Whether the same sample always has the same reward. False for a judge that samples.
    """

    is_deterministic: ClassVar[bool] = True
    _changes: ClassVar[dict[str, str]] = {}

    def make_reward(self) -> Reward:
        """Return the reward, as a YAML file would make it."""
        raise NotImplementedError(f"{type(self).__name__}.make_reward must return the reward to test")

    def samples(self) -> Sequence[Sample]:
        """Return at least three samples that it can score, with different rewards; see :func:`make_sample`."""
        return [make_sample(text, answer="4") for text in ("4", "the answer is 5", "", "2+2=4, so 4")]

    def _subject(self) -> str:
        return type(self.make_reward()).__name__

    def _score(self, reward: Reward, *batches: Sequence[Sample]) -> list[Call]:
        """Score batches at once; each call gets copies, as in a run. What they change of the process is kept."""
        calls = [functools.partial(reward.score, [own_copy(sample) for sample in batch]) for batch in batches]
        before, files = process_state(), {*os.listdir()}
        try:
            return run_calls(calls, self.deadline_s)
        finally:
            made = sorted({*os.listdir(), *files} - files) if os.getcwd() == before["working directory"] else []
            changes = changes_since(before) | ({"files in the working folder": ", ".join(made)} if made else {})
            type(self)._changes = {**type(self)._changes, **changes}

    def _is_late(self) -> bool:
        """Return whether ordinary samples take too long, which is a check of its own."""
        (call,) = self._score(self.make_reward(), self.samples()[:1])
        return "took longer" in call.error

    def _values(self, reward: Reward, *batches: Sequence[Sample]) -> list[list[float | None]]:
        """Return the numbers of batches, ``None`` for errors; skip the check where calls fail or are malformed."""
        values: list[list[float | None]] = []
        for batch, call in zip(batches, self._score(reward, *batches), strict=True):
            if call.error or not isinstance(call.value, list) or len(call.value) != len(batch):
                pytest.skip(NOT_COMPARED)
            try:
                values.append([None if isinstance(v, RewardError) else as_reward(v) for v in call.value])
            except CallError:
                pytest.skip(NOT_COMPARED)
        return values

    # ---- what a run needs of every reward -------------------------------------------------------------------------

    def test_name_weight_and_batch_size_are_usable(self) -> None:
        try:
            RewardRunner([self.make_reward()])
        except (ConfigError, AttributeError, TypeError) as error:
            pytest.fail(f"a run refuses the reward: {error} Call super().__init__(weight, name).", pytrace=False)

    def test_notes_are_texts(self) -> None:
        notes = self.make_reward().notes()
        assert isinstance(notes, list), f"notes() returned {brief(notes)}: return a list of texts."
        assert all(isinstance(note, str) for note in notes), f"notes() returned {brief(notes)}: return a list of texts."

    def test_calls_end_by_their_deadline(self) -> None:
        (call,) = self._score(self.make_reward(), self.samples())
        assert "took longer" not in call.error, (
            f"score {call.error}. Give what it asks a shorter deadline, return a RewardError when that passes, and "
            "await instead of blocking where score is async."
        )

    def test_samples_are_scored_without_exceptions(self) -> None:
        (call,) = self._score(self.make_reward(), self.samples())
        raised = call.error if "took longer" not in call.error else ""
        assert not raised, f"score raised {raised}. Override samples() with samples that this reward can score."

    def test_there_is_one_value_for_each_sample(self) -> None:
        reward, samples = self.make_reward(), self.samples()
        for batch, call in zip((samples, samples[:1]), self._score(reward, samples, samples[:1]), strict=True):
            if call.error:
                pytest.skip(NOT_COMPARED)
            assert isinstance(call.value, list), f"score returned {brief(call.value)}: return a list of numbers."
            found = len(call.value)
            assert found == len(batch), f"score returned {found} values for {len(batch)} samples: return one for each."

    def test_values_are_numbers_or_errors(self) -> None:
        (call,) = self._score(self.make_reward(), self.samples())
        if call.error or not isinstance(call.value, list):
            pytest.skip(NOT_COMPARED)
        for value in call.value:
            if isinstance(value, RewardError):
                assert isinstance(value.message, str) and value.message, (  # noqa: PT018
                    f"a RewardError has the message {brief(value.message)}: say in a sentence why there is no reward."
                )
                continue
            try:
                as_reward(value)
            except CallError as problem:
                pytest.fail(f"score returned {problem}. Return a RewardError where there is no reward.", pytrace=False)

    def test_samples_have_rewards(self) -> None:
        (values,) = self._values(self.make_reward(), self.samples())
        assert any(value is not None for value in values), (
            "every sample is an error: override samples() with samples that this reward can score."
        )

    def test_counts_are_numbers_since_the_last_call(self) -> None:
        reward = self.make_reward()
        self._score(reward, self.samples())
        call = PluginCall(reward, "pop_counts")
        try:
            read_metrics(call, reward.pop_counts())
            again = read_metrics(call, reward.pop_counts())
        except RunError as problem:
            pytest.fail(str(problem), pytrace=False)
        assert not any(again.values()), f"{call} returned {again} at once after a call: return what came since."

    # ---- what a reward depends on ---------------------------------------------------------------------------------

    def test_rewards_repeat(self) -> None:
        if not self.is_deterministic:
            pytest.skip("does not apply: is_deterministic is False")
        reward = self.make_reward()
        (first,), (again,) = self._values(reward, self.samples()), self._values(reward, self.samples())
        (other,) = self._values(self.make_reward(), self.samples())
        advice = "A resumed run would train on others. Keep no state between calls, and seed what is random."
        assert _equal(first, again), f"the same samples got {first}, and then {again}. {advice}"
        assert _equal(first, other), f"the same samples got {first}, and of a second object {other}. {advice}"

    def test_rewards_do_not_depend_on_the_batch(self) -> None:
        """A sample's reward is its own, whatever else is in the call and in which order.

        Of a reward that compares a group, it is the sample's also in another order.
        """
        if not self.is_deterministic:
            pytest.skip("does not apply: is_deterministic is False")
        reward, samples = self.make_reward(), self.samples()
        (together,) = self._values(reward, samples)
        if not _equal(together, self._values(reward, samples)[0]):
            pytest.skip(NOT_COMPARED)
        (backwards,) = self._values(reward, samples[::-1])
        assert _equal(together, backwards[::-1]), (
            f"samples in another order got {backwards[::-1]} instead of {together}: return values in the order of "
            "the samples, and score each by itself. A judge that compares a group sees each pair in both orders."
        )
        if reward.compares_group:
            return
        alone = [value for sample in samples for (value,) in self._values(reward, [sample])]
        assert _equal(together, alone), f"samples alone got {alone}, and in one call {together}: score each by itself."

    def test_concurrent_calls_do_not_mix(self) -> None:
        """A run scores many samples at once; what one call keeps in ``self``, another overwrites."""
        if not self.is_deterministic:
            pytest.skip("does not apply: is_deterministic is False")
        reward, samples = self.make_reward(), self.samples()
        calls = [samples] if reward.compares_group else [[sample] for sample in samples]
        alone = [value for call in calls for value in self._values(reward, call)[0]]
        if not _equal(alone, [value for call in calls for value in self._values(reward, call)[0]]):
            pytest.skip(NOT_COMPARED)
        together = [value for values in self._values(reward, *calls * NUM_THREADS) for value in values]
        assert _equal(together, alone * NUM_THREADS), (
            f"calls at the same time got {together[: len(alone)]}, and one after the other {alone}: keep what belongs "
            "to a call in local variables."
        )

    def test_global_random_generators_are_left_alone(self) -> None:
        with same_random_generators("the reward"):
            self._score(self.make_reward(), self.samples())

    def test_the_process_is_left_as_it_was(self) -> None:
        """Also by a first call, in an earlier check: a change that is made once is there in all later ones."""
        self._score(self.make_reward(), self.samples())
        changes = type(self)._changes
        assert not changes, (
            f"score changes {'; '.join(f'{name} ({how})' for name, how in changes.items())}: the trainer and all other "
            "rewards share them. Pass options to the calls that need them, and write into a temporary folder."
        )

    def test_a_pickled_reward_scores_alike(self) -> None:
        """Workers of plugins get rewards so; one that cannot be pickled is passed over."""
        if not self.is_deterministic:
            pytest.skip("does not apply: is_deterministic is False")
        reward = self.make_reward()
        try:
            again = pickle.loads(pickle.dumps(reward))
        except Exception as error:  # noqa: BLE001 - whatever it raises, it says that it cannot
            pytest.skip(f"does not apply: the reward cannot be pickled ({type(error).__name__})")
        (expected,), (found,) = self._values(reward, self.samples()), self._values(again, self.samples())
        assert _equal(expected, found), (
            f"after a pickle samples got {found} instead of {expected}: keep what scoring reads in attributes of the "
            "object, or refuse to be pickled."
        )

    # ---- rewards that scale ---------------------------------------------------------------------------------------

    def test_scaled_values_are_numbers(self) -> None:
        """Each of a rank's samples has one, in every round, also where a rank has no sample."""
        reward, samples = self._scaling()
        for some in (samples, samples[:1], [], samples):
            returned = list(reward.scale(some, lambda array: array))
            what = f"scale of {len(some)} samples returned {brief(returned)}: return a finite number for each"
            assert len(returned) == len(some), f"{what}, whatever was scaled before."
            valid = [value for value, sample in zip(returned, some, strict=True) if not sample.errors]
            assert all(_is_reward(value) for value in valid), f"{what} without an error."

    def test_scaling_goes_on_from_its_state(self) -> None:
        reward, samples = self._scaling()
        values = [sample.rewards[reward.name] for sample in samples]
        others = [value if isinstance(value, RewardError) else 10 * value + 1 for value in values]
        former = [  # of other values, so that what is kept of them shows
            dataclasses.replace(sample, rewards={reward.name: value})
            for sample, value in zip(samples, others, strict=True)
        ]
        reward.scale(former, lambda array: array)
        state = json.loads(json.dumps(reward.state_dict()))
        again: Any = self.make_reward()
        again.load_state_dict(state)
        expected, found = (list(each.scale(samples, lambda array: array)) for each in (reward, again))
        assert _equal(expected, found), (
            f"after a resume scale returned {found} instead of {expected}: state_dict must hold, as plain data, what "
            "scale keeps between rounds, and load_state_dict restore all of it."
        )

    def _scaling(self) -> tuple[Any, list[Sample]]:
        """Return a reward that scales, and scored samples of one group; skip the check for others."""
        reward = self.make_reward()
        if not reward.scales:
            pytest.skip("does not apply: scales is False")
        samples = self.samples()
        (values,) = self._values(reward, samples)
        errors = [RewardError("failed") if value is None else value for value in values]
        return reward, [
            dataclasses.replace(sample, rewards={reward.name: value})
            for sample, value in zip(samples, errors, strict=True)
        ]

    # ---- what a policy may write ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("what", HOSTILE)
    def test_any_text_gets_a_number_or_an_error(self, what: str) -> None:
        sample = self.samples()[0]
        made = make_sample(HOSTILE[what], sample.prompt.answer, sample.prompt.text, **sample.prompt.metadata)
        (call,) = self._score(self.make_reward(), [made])
        advice = "Score what is malformed with a low reward, or return a RewardError: a policy writes anything."
        if call.error and self._is_late():
            pytest.skip(NOT_COMPARED)
        assert not call.error, f"a completion of {what}: score {call.error}. {advice}"
        for value in call.value if isinstance(call.value, list) else ():
            assert isinstance(value, RewardError) or _is_reward(value), f"{what} got {brief(value)}. {advice}"

    def test_a_prompt_without_an_answer_gets_a_number_or_an_error(self) -> None:
        sample = self.samples()[0]
        made = make_sample(sample.completion, None, sample.prompt.text)
        (call,) = self._score(self.make_reward(), [made])
        if call.error and self._is_late():
            pytest.skip(NOT_COMPARED)
        assert not call.error, (
            f"a prompt without answer and metadata: score {call.error}. Return a RewardError that names the field "
            "which the reward needs: a file of prompts may lack it."
        )


def _equal(first: Sequence[float | None], second: Sequence[float | None]) -> bool:
    return [_rounded(value) for value in first] == [_rounded(value) for value in second]


def _rounded(value: float | None) -> float | None:
    """Return seven digits: a model in a batch of another size rounds differently."""
    return None if value is None else float(f"{value:.6e}")


def _is_reward(value: Any) -> bool:
    try:
        return math.isfinite(as_reward(value))
    except CallError:
        return False
