"""Checks of what a run needs of every reward: claims, prompts that it takes, calls, values, counts."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import pytest
import torch

from rlplug.errors import ConfigError, RunError, brief, describe
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.metrics import read_metrics
from rlplug.interfaces.plain_values import as_reward
from rlplug.interfaces.reward import Reward
from rlplug.rewards.runner import RewardRunner
from rlplug.timeouts import CallError
from rlplug.types import Prompt, RewardError, Sample
from rlplug_devkit.tasks.calls import eager_threads, is_same, slow_motion
from rlplug_devkit.tasks.scoring import Scores, same_values, with_answer

OTHER_ANSWER: Final = "no such answer 918273"
NUM_TIMED: Final = 5
"""Calls of which the fastest counts: others wait for the machine."""
NUM_COUNTED: Final = 8
"""Prompts of which calls are counted."""
NUM_ASKED: Final = 8
"""Times that they are counted while counts are asked for: a fault shows where two calls meet."""
TIMES_CLAIMED: Final = 2.0
"""How much longer than ``deadline_s`` the fastest call may take, on a machine that does other work too."""


class RewardCallChecks(Scores):
    """Checks of a reward's claims and calls."""

    # ---- claims ---------------------------------------------------------------------------------------------------

    def test_name_weight_and_batch_size_are_usable(self) -> None:
        try:
            reward = self.make_reward()
            RewardRunner([reward], deadline_s=max(self.deadline_s, reward.deadline_s or 0.0))
        except (ConfigError, AttributeError, TypeError) as error:
            pytest.fail(f"a run refuses the reward: {error} Call super().__init__(weight, name).", pytrace=False)
        for option, value in (("name", "another_name"), ("weight", 2.5)):
            made = self._made_with(option, value)
            assert made is None or getattr(made, option) == value, (
                f"with {option}={value!r} the reward has the {option} {getattr(made, option)!r}: call "
                "super().__init__(weight, name), or leave the option out."
            )

    def _made_with(self, option: str, value: Any) -> Reward | None:
        """Return the reward with another value of an option; ``None`` where it has no such option, or refuses it."""
        made: Any = type(self.make_reward())
        init = made.__init__
        if option not in inspect.signature(init).parameters:
            return None

        @functools.wraps(init)
        def changed(reward: Reward, *args: Any, **options: Any) -> None:
            init(reward, *args, **(options | {option: value}))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(made, "__init__", changed)
            try:
                return self.make_reward()
            except Exception:  # noqa: BLE001 - it may be given by place
                return None

    def test_claims_are_of_their_kinds(self) -> None:
        reward = self.make_reward()
        for name in ("compares_group", "needs_answer", "scales", "scales_group", "of_environment"):
            value = getattr(reward, name)
            assert isinstance(value, bool), f"{name} is {brief(value)}: claim True or False."
        deadline_s: Any = reward.deadline_s
        assert deadline_s is None or deadline_s > 0, (
            f"deadline_s is {brief(deadline_s)}: give seconds above 0, or None."
        )
        counts: dict[str, Any] = {"batch_size": reward.batch_size}
        counts |= {} if reward.max_calls is None else {"max_calls": reward.max_calls}
        for name, count in counts.items():
            is_known = isinstance(count, int | np.integer) and not isinstance(count, bool) and count > 0
            assert is_known, f"{name} is {brief(count)}: claim a number above 0."
        assert reward.scales or not reward.scales_group, "scales_group is True, and scales is not: claim both."
        returned: Any = reward.device_bytes()
        is_size = isinstance(returned, tuple) and list(map(type, returned)) == [int, bool] and returned[0] >= 0
        assert is_size, f"device_bytes() returned {brief(returned)}: return bytes and whether they are kept."

    def test_notes_are_texts(self) -> None:
        reward = self.make_reward()
        try:
            with self._guard().around("place and notes"):
                reward.place(torch.device("cpu"))
                notes: Any = reward.notes()
        except Exception as error:  # noqa: BLE001 - the reward's own
            pytest.fail(f"a run cannot start the reward: place or notes raised {describe(error)}", pytrace=False)
        is_known = isinstance(notes, list) and all(isinstance(note, str) for note in notes)
        assert is_known, f"notes() returned {brief(notes)}: return a list of texts."
        expected = self.expected_notes()
        assert expected is None or notes == list(expected), f"notes() returned {notes}, and expected is {expected}."

    def test_ordinary_prompts_are_accepted(self) -> None:
        """A run asks before anything is loaded, and may find no prompt."""
        prompts = [sample.prompt for sample in self.samples()]
        given, reward = copy.deepcopy(prompts), self.make_reward()
        try:
            with self._guard().around("check_prompts"):
                reward.check_prompts(given)
                reward.check_prompts([])
        except Exception as error:  # noqa: BLE001 - whatever it is, a run ends with it
            pytest.fail(f"check_prompts refuses prompts that score takes: {describe(error)}", pytrace=False)
        assert is_same(given, prompts), (
            "check_prompts changes the prompts, which all rewards and the policy get: copy them."
        )

    def test_prompts_without_a_needed_answer_are_refused(self) -> None:
        reward = self.make_reward()
        if not reward.needs_answer:
            pytest.skip("does not apply: needs_answer is False")
        self._require_refused(reward, with_answer(self.samples()[0], None).prompt, "without the answer that it needs")

    def test_prompts_that_cannot_be_scored_are_refused(self) -> None:
        """Each by its uid: a run would count it as an error at every step."""
        prompts = self.broken_prompts()
        if not prompts:
            pytest.skip("does not apply: broken_prompts returns none")
        for prompt in prompts:
            what = f"with the answer {brief(prompt.answer)} and the metadata {brief(prompt.metadata)}"
            self._require_refused(self.make_reward(), prompt, what)

    def _is_refused(self, reward: Reward, prompt: Prompt) -> bool:
        try:
            reward.check_prompts([prompt])
        except ConfigError as error:
            return prompt.uid in str(error)
        return False

    def _require_refused(self, reward: Reward, prompt: Prompt, what: str) -> None:
        self._require_refusal(reward, [prompt], what)
        others, later = [sample.prompt for sample in self.samples()], self.make_reward()
        later.check_prompts(others)
        self._require_refusal(later, [prompt], f"of a second source, {what}")
        self._require_refusal(self.make_reward(), [*others, prompt], f"behind others, {what}")

    def _require_refusal(self, reward: Reward, prompts: Sequence[Prompt], what: str) -> None:
        """Fail where ``check_prompts`` does not refuse the last of some prompts."""
        try:
            reward.check_prompts(prompts)
        except ConfigError as error:
            if prompts[-1].uid not in str(error):
                pytest.fail(f"check_prompts raised {error}: name the prompt's uid.", pytrace=False)
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the wrong one
            pytest.fail(f"check_prompts raised {describe(error)}: raise a ConfigError with the uid.", pytrace=False)
        pytest.fail(
            f"check_prompts takes a prompt {what}: refuse it by its uid; super() does so for needs_answer.",
            pytrace=False,
        )

    # ---- calls and their values -----------------------------------------------------------------------------------

    def test_calls_end_by_their_deadline(self) -> None:
        reward: Any = self._ready()
        (calls,) = self._score(reward, self.samples())
        errors = [call.error for call in calls if "took longer" in call.error]
        type(self)._is_late = bool(errors)
        assert not errors, (
            f"score {errors[0]}. Give what it asks a shorter deadline, return a RewardError when that passes, and "
            "await instead of blocking where score is async."
        )
        if reward.deadline_s is not None:
            self._require_time(reward, reward.deadline_s)

    def _require_time(self, reward: Reward, claimed_s: float) -> None:
        """Fail when each of some calls takes much longer than the reward says that any does."""
        fastest_s = math.inf
        for _ in range(NUM_TIMED):
            ((call,),) = self._score(reward, self.samples()[:1])
            fastest_s = min(fastest_s, call.seconds)
            if fastest_s <= TIMES_CLAIMED * claimed_s:
                return
        pytest.fail(
            f"a call takes {fastest_s:.3g} s, and deadline_s is {claimed_s:g}: claim the longest time of a call.",
            pytrace=False,
        )

    def test_samples_are_scored_without_exceptions(self) -> None:
        (calls,) = self._score(self._ready(), self.samples())
        errors = [call.error for call in calls if call.error]
        assert not errors, f"score raised {errors[0]}. Override samples() with samples that this reward can score."

    def test_there_is_one_value_for_each_sample(self) -> None:
        """Also in a full call, of equal samples too, and in one of more than ``batch_size``, which may be refused."""
        reward, samples = self._ready(), self.samples()
        full = [samples[index % len(samples)] for index in range(min(reward.batch_size, 64))]
        for batch in (samples, samples[:1], full, [samples[0]] * len(full)):
            ((call,),) = self._score(reward, batch, whole=True)
            if call.error and (reward.compares_group or len(batch) <= reward.batch_size):
                self._not_compared(f"score {call.error}")
            if call.error:
                continue
            assert isinstance(call.value, list), f"score returned {brief(call.value)}: return a list of numbers."
            found = len(call.value)
            assert found == len(batch), f"score returned {found} values for {len(batch)} samples: return one for each."

    def test_values_are_numbers_or_errors(self) -> None:
        (calls,) = self._score(self._ready(), self.samples())
        for call in calls:
            if call.error or not isinstance(call.value, list):
                self._not_compared(f"score {call.error or 'returned no list'}")
            self._require_values(call.value)

    def _require_values(self, values: Sequence[Any]) -> None:
        for value in values:
            if isinstance(value, RewardError):
                is_text = isinstance(value.message, str) and bool(value.message.strip())
                assert is_text, f"a RewardError has the message {brief(value.message)}: say why there is no reward."
                continue
            try:
                as_reward(value)
            except CallError as problem:
                pytest.fail(f"score returned {problem}. Return a RewardError where there is no reward.", pytrace=False)

    def test_samples_have_different_rewards(self) -> None:
        """Checks of what a reward depends on need rewards that differ."""
        (values,) = self._values(self._ready(), self.samples())
        known = {value for value in values if value is not None}
        assert known, (
            "every sample is an error: give sample_rows, or override samples(), with what this reward can score."
        )
        fix = "give sample_rows, or override samples(), with some that it tells apart"
        assert len(known) > 1, f"all samples get {values}: {fix}."

    def test_samples_have_the_expected_rewards(self) -> None:
        expected = self.expected()
        if expected is None:
            pytest.skip("does not apply: expected returns None")
        (values,) = self._values(self._ready(), self.samples())
        assert same_values(values, expected), f"samples get {values}, and expected is {expected}."

    def test_groups_of_one_and_of_equals_have_values(self) -> None:
        """A group may lose all samples but one, and a sure policy writes the same each time."""
        reward, samples = self._ready(), self.samples()
        if not reward.compares_group:
            pytest.skip("does not apply: compares_group is False")
        for group in (samples[:1], [samples[0]] * 4):
            ((call,),) = self._score(reward, group)
            assert not call.error, f"score of a group of {len(group)} equal samples {call.error}."
            values = call.value if isinstance(call.value, list) else [call.value]
            assert len(values) == len(group), f"score returned {len(values)} values for a group of {len(group)}."
            self._require_values(values)

    def test_counts_are_numbers_since_the_last_call(self) -> None:
        reward = self._ready()
        self._score(reward, self.samples())
        call = PluginCall(reward, "pop_counts")
        try:
            with self._guard().around("pop_counts"):
                read_metrics(call, reward.pop_counts())
                again = read_metrics(call, reward.pop_counts())
        except RunError as problem:
            pytest.fail(str(problem), pytrace=False)
        assert not any(again.values()), f"{call} returned {again} at once after a call: return what came since."
        once, again, parts = (self._counted_in_turn(asks_often) for asks_often in (False, False, True))
        steady = [name for name, count in once.items() if math.isclose(count, again.get(name, math.nan))]
        wrong = [name for name in steady if not math.isclose(parts.get(name, 0.0), once[name], abs_tol=1e-9)]
        assert not wrong, (
            f"{call} returned {parts.get(wrong[0], 0.0):g} {wrong[0]} in all where it was asked after each call, and "
            f"{once[wrong[0]]:g} where it was asked once: a run adds counts up. Return sums, and no mean or share."
        )

    def _counted_in_turn(self, asks_often: bool) -> dict[str, float]:
        """Return the sums of all counts of calls one after the other; ``asks_often`` asks for them after each."""
        reward, counts = self._ready(), dict[str, float]()
        samples = self.samples()
        calls = [samples, samples[:1]] if reward.compares_group else [[sample] for sample in samples]
        for number, call in enumerate(calls, start=1):
            self._score(reward, call)
            for name, value in reward.pop_counts().items() if asks_often or number == len(calls) else ():
                counts[name] = counts.get(name, 0.0) + value
        return counts

    def test_no_count_is_lost_while_others_score(self) -> None:
        """A run asks for counts while other calls count: of the counts that calls decide, none may be lost."""
        self._skip_after_failure()
        if type(self.make_reward()).pop_counts is Reward.pop_counts:
            pytest.skip("does not apply: pop_counts is not its own")
        samples = [each for number in range(NUM_COUNTED) for each in self._numbered(number)]
        alone = [self._counted(samples, popping=False) for _ in range(2)]
        decided = [name for name, value in alone[0].items() if value and value == alone[1].get(name)]
        if not decided:
            pytest.skip("does not apply: pop_counts returns no count that calls alone decide")
        for _ in range(NUM_ASKED):
            with eager_threads():
                found = self._counted(samples, popping=True)
            lost = [name for name in decided if found.get(name, 0.0) < alone[0][name]]
            assert not lost, (
                f"while other threads were in score, pop_counts returned {found.get(lost[0], 0.0):g} {lost[0]} in all, "
                f"and {alone[0][lost[0]]:g} came: take counts and clear them under the lock under which score adds to "
                "them."
            )

    def _numbered(self, number: int) -> list[Sample]:
        """Return the samples of other prompts, which no cache knows."""
        return [with_answer(each, each.prompt.answer, f"{each.prompt.text} {number}") for each in self.samples()]

    def _counted(self, samples: Sequence[Sample], popping: bool) -> dict[str, float]:
        """Return the sums of all counts of some calls at once; ``popping`` asks for them meanwhile."""
        reward, counts, is_over = self._ready(), dict[str, float](), threading.Event()
        groups = [samples] if reward.compares_group else [[sample] for sample in samples]

        def pop() -> None:
            for name, value in reward.pop_counts().items():
                counts[name] = counts.get(name, 0.0) + value

        def pop_meanwhile() -> None:
            with slow_motion():
                while popping and not is_over.is_set():
                    pop()

        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(pop_meanwhile)
            try:
                self._score(reward, *groups)
            finally:
                is_over.set()
        if error := asked.exception():
            pytest.fail(f"while other threads were in score, pop_counts raised {describe(error)}.", pytrace=False)
        pop()
        return counts

    def test_a_needed_answer_is_read(self) -> None:
        reward = self._ready()
        if not reward.needs_answer:
            pytest.skip("does not apply: needs_answer is False")
        samples = self.samples()
        others = self._with_other_answers(samples)
        values, changed = self._values(reward, samples), self._values(reward, others)
        assert not same_values(values[0], changed[0]), (
            f"needs_answer is True, and other answers give the same rewards {values[0]}: read prompt.answer, or take "
            "prompts without one."
        )

    def _with_other_answers(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with another answer: a text for a text, and otherwise that of another sample."""
        answers = [sample.prompt.answer for sample in samples]
        moved = [*answers[1:], answers[0]]
        return [
            with_answer(sample, OTHER_ANSWER if isinstance(answer, str) else moved[index])
            for index, (sample, answer) in enumerate(zip(samples, answers, strict=True))
        ]
