"""Checks of a source's training prompts: their order, their place, and what they learn of samples."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import pytest
import torch

from rlplug.data.prompt_encoder import PromptEncoder, PromptRules
from rlplug.data.prompt_stream import PromptStream, TrainingPrompts
from rlplug.data.sources import PromptRow, PromptSource
from rlplug.errors import ConfigError, describe
from rlplug.interfaces import Reward
from rlplug.types import Prompt, RewardError, Sample
from rlplug_devkit.kit import check_refused
from rlplug_devkit.models import make_byte_tokenizer
from rlplug_devkit.tasks.calls import is_same
from rlplug_devkit.tasks.rows import SourceRowChecks
from rlplug_devkit.tasks.scoring import make_sample

NUM_DRAWN: Final = 8
"""Training prompts that are drawn before and behind a place."""
NUM_LATER: Final = 400
"""Most training prompts that are drawn behind samples that were observed, besides the first ones."""
KEY: Final = "data.train"
MEETING_S: Final = 60.0
"""Longest time that one rank waits for the other, in seconds."""


class TrainingPromptChecks(SourceRowChecks):
    """Checks of what ``for_training`` returns."""

    def expected_draws(self) -> Sequence[str] | None:
        """Return the uids of the first prompts, at most 16, that a training draws with ``data.shuffle: false``.

        It draws eight in each of two steps, and observes a sample of each: without a reward, 1, 0, without, 0, 1,
        without, 1.
        """
        return None

    def expected_metrics(self) -> Mapping[str, float]:
        """Return what ``metrics`` has after the second of these steps, and was asked after the first; or a part."""
        return {}

    def untrainable(self) -> Sequence[tuple[str, Callable[[], PromptSource]]]:
        """Return makers of sources that only a training refuses, each behind what the message has to name."""
        return ()

    def _training_prompts(self, seed: int | str = 1, shuffle: bool = True, name: str = "") -> TrainingPrompts:
        """Return training prompts as a run makes them; end the check where that fails."""
        prompts: TrainingPrompts = self._of_training(lambda: make_prompts(self.make_source(), seed, shuffle, name))
        return prompts

    def _of_training(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns, in a call; skip the check where rows or earlier prompts are at fault."""
        self._skip_after_failure()
        with self._guard().around("for_training"):
            (call,) = self._calls([function], read=lambda returned: returned)
        if call.error:
            self._not_compared(f"for_training and its prompts: {call.error}")
        return call.value

    def _taken(self, prompts: TrainingPrompts, num_prompts: int) -> list[Prompt]:
        taken: list[Prompt] = self._of_training(lambda: prompts.take(num_prompts))
        return taken

    def test_rows_for_training_are_known_by_their_part(self) -> None:
        """A mixture gives each part a name, which its rows' uids begin with."""
        for name in ("", "part") if self.is_part else ("",):
            known = self._of_training(functools.partial(self._known, name))
            assert known, "for_training knows no row: give its rows, or the first ones, as known."
            if not self.is_part:
                return
            wrong = [row.uid for row in known if row.source != name or not row.uid.startswith(f"{name}/" * bool(name))]
            assert not wrong, f"in the part {name!r} of a mixture, {wrong[0]!r} is not of_part(row, {name!r})."
        drawn = {prompt.source for prompt in self._taken(self._training_prompts(name="part"), NUM_DRAWN)}
        assert drawn == {"part"}, f"in the part 'part' of a mixture, prompts are of {sorted(drawn)}: use of_part."

    def _known(self, name: str) -> list[PromptRow]:
        return list(self.make_source().for_training(KEY, name).known)

    def test_training_prompts_are_as_they_say(self) -> None:
        prompts = self._training_prompts()
        drawn = self._taken(prompts, NUM_DRAWN)
        assert len(drawn) == NUM_DRAWN, f"take({NUM_DRAWN}) returned {len(drawn)} prompts: begin anew at the end."
        assert self._taken(prompts, 0) == [], "take(0) returned prompts."
        count: Any = prompts.num_prompts
        assert count is None or (type(count) is int and count > 0), f"num_prompts is {count!r}: a number, or None."
        longest = max(len(prompt.token_ids) for prompt in drawn)
        assert longest <= prompts.longest_prompt, f"a prompt has {longest} tokens, and longest_prompt says otherwise."
        by_uid = prompts.by_uid
        is_counted = not by_uid or count == len(by_uid)
        assert is_counted, f"num_prompts is {count}, and by_uid has {len(by_uid)} prompts: count those of one pass."
        wrong = [prompt.uid for prompt in drawn if by_uid and not is_same(by_uid.get(prompt.uid), prompt)]
        assert not wrong, f"by_uid does not have the prompt {wrong[0]!r} that was drawn."
        metrics: Any = dict(prompts.metrics())
        is_known = all(isinstance(n, str) and isinstance(v, int | float) for n, v in metrics.items())
        assert is_known, f"metrics() returned {metrics}: return numbers by name."

    def test_training_prompts_go_on_at_their_place(self) -> None:
        """A checkpoint has the place in the prompts, however the source draws them, and what they have learnt."""
        expected = self._taken(self._training_prompts(), 2 * NUM_DRAWN)
        for place in (0, 1, NUM_DRAWN):
            first, second = self._training_prompts(), self._training_prompts()
            assert is_same(self._taken(first, place), expected[:place]), (
                f"a second rank draws others of the first {place}."
            )
            state = self._state(first)
            self._taken(second, NUM_DRAWN - place)
            second.load_state_dict(state)
            assert is_same(self._taken(second, NUM_DRAWN), expected[place : place + NUM_DRAWN]), (
                f"training prompts with the state after {place} of them go on elsewhere."
            )

    def test_observed_samples_go_on_too(self) -> None:
        """A rank may have no sample of a step; what prompts learn of samples is in their state."""
        first, second = self._training_prompts(), self._training_prompts()
        for _ in range(2):
            drawn = self._taken(first, NUM_DRAWN)
            self._of_training(functools.partial(first.observe, _scored(drawn), of_one_rank))
        self._of_training(lambda: first.observe([], of_one_rank))
        second.load_state_dict(self._state(first))
        # what was learned may matter a pass later
        num_later = 2 * NUM_DRAWN + min(2 * (first.num_prompts or 0), NUM_LATER)
        expected, found = (self._taken(each, num_later) for each in (first, second))
        assert is_same(expected, found), (
            "a resumed run draws other prompts than one that goes on: put all into state_dict."
        )

    def test_ranks_learn_the_same(self) -> None:
        """Each observes samples of its own, the second one once none, and all draw the same from then on."""
        alone, *ranks = (self._training_prompts() for _ in range(3))
        for num_first in (NUM_DRAWN // 2, NUM_DRAWN):
            samples = _scored(self._taken(alone, NUM_DRAWN))
            self._of_training(functools.partial(alone.observe, samples, of_one_rank))
            for rank in ranks:
                self._taken(rank, NUM_DRAWN)
            self._observe_on_ranks(ranks, samples, num_first)
        expected, *found = (self._taken(each, 2 * NUM_DRAWN) for each in (alone, *ranks))
        assert all(is_same(each, expected) for each in found), (
            "two ranks that observe half of the samples each draw other prompts than one that observes all: learn of "
            "what gather_arrays returns, the same on every rank."
        )

    def _observe_on_ranks(self, ranks: Sequence[TrainingPrompts], samples: Sequence[Sample], num_first: int) -> None:
        """Let two ranks observe samples at once, the first one ``num_first`` of them."""
        gather = _Meeting(len(ranks))
        parts = (samples[:num_first], samples[num_first:])
        observe = [
            functools.partial(rank.observe, part, gather.of(number))
            for number, (rank, part) in enumerate(zip(ranks, parts, strict=True))
        ]
        if problem := next((call.error for call in self._calls(observe) if call.error), ""):
            self._not_compared(f"observe() on two ranks: {problem}. All ranks make the same calls of gather_arrays")

    def test_a_state_of_other_prompts_is_refused(self) -> None:
        """One of another source, and one of another order; ``fingerprint`` says what a state belongs to."""
        prompts, others = self._training_prompts(), self._training_prompts(seed=2)
        draws = [self._taken(each, 2 * NUM_DRAWN) for each in (self._training_prompts(), others)]
        states = {"another source": PromptStream([Prompt("of another source", (1,), "")]).state_dict()}
        if not is_same(*draws):
            states["another order"] = self._of_training(others.state_dict)
        assert "fingerprint" in self._of_training(others.state_dict), "a state has no 'fingerprint': a run reads it."
        for what, state in states.items():
            try:
                prompts.load_state_dict(state)
            except ConfigError:
                continue
            except Exception as error:  # noqa: BLE001 - whichever it is, it is the wrong one
                pytest.fail(f"a state of {what} raised {describe(error)}. Raise a ConfigError.", pytrace=False)
            pytest.fail(
                f"a state of {what} is taken: keep what it belongs to under 'fingerprint', and raise a ConfigError "
                "where that differs.",
                pytrace=False,
            )

    def test_what_cannot_train_is_refused(self) -> None:
        """Before a run trains, and the message names what is wrong."""
        cases = self.untrainable()
        if not cases:
            pytest.skip("does not apply: untrainable returns none")
        for name, make in cases:
            check_refused(name, lambda each: make_prompts(each()), make, taken="trains")

    def test_training_draws_are_the_expected_ones(self) -> None:
        """In two steps, and what there is to log of them."""
        draws, metrics = self.expected_draws(), self.expected_metrics()
        if draws is None and not metrics:
            pytest.skip("does not apply: expected_draws returns None, and expected_metrics nothing")
        prompts = self._training_prompts(shuffle=False)
        taken: list[str] = []
        logged: Mapping[str, float] = {}
        for _ in range(2):
            drawn = self._taken(prompts, NUM_DRAWN)
            taken += [prompt.uid for prompt in drawn]
            self._of_training(functools.partial(prompts.observe, _scored(drawn), of_one_rank))
            logged = self._of_training(prompts.metrics)
        if draws is not None:
            assert taken[: len(draws)] == [*draws], f"a training draws {taken}, and expected is {[*draws]}."
        found = {name: logged.get(name) for name in metrics}
        assert found == pytest.approx(dict(metrics)), f"metrics are {found}, and expected are {dict(metrics)}."

    def _state(self, prompts: TrainingPrompts) -> Any:
        saved = io.BytesIO()
        torch.save(self._of_training(prompts.state_dict), saved)
        saved.seek(0)
        try:
            return torch.load(saved, weights_only=True)
        except pickle.UnpicklingError as error:
            text = str(error).partition("\n")[0]
            pytest.fail(f"state_dict() of training prompts is no plain data, nor tensors: {text}", pytrace=False)

    def test_a_state_stays_as_it_was(self) -> None:
        """A step that is undone restores the state from before."""
        prompts = self._training_prompts()
        self._taken(prompts, 3)
        state = self._of_training(prompts.state_dict)
        kept = as_text(state)
        expected = self._taken(prompts, NUM_DRAWN)
        self._of_training(lambda: prompts.observe(_scored(expected), of_one_rank))
        assert as_text(state) == kept, "later draws change what state_dict returned: return a copy."
        prompts.load_state_dict(state)
        assert is_same(self._taken(prompts, NUM_DRAWN), expected), (
            "a state, restored in the same object, goes on elsewhere."
        )

    def test_draws_do_not_depend_on_their_size(self) -> None:
        """A step of a resumed run may draw in other portions."""
        whole, parts = self._training_prompts(), self._training_prompts()
        expected = self._taken(whole, 2 * NUM_DRAWN)
        found = [prompt for size in (1, 2, 5, NUM_DRAWN) for prompt in self._taken(parts, size)]
        assert is_same(expected, found), "prompts that are drawn in other portions are others: keep one order."

    def test_the_seed_gives_the_order(self) -> None:
        orders = [
            [prompt.uid for prompt in self._taken(self._training_prompts(seed, shuffle), 2 * NUM_DRAWN)]
            for seed, shuffle in ((1, True), (2, True), (1, False), (2, False))
        ]
        if len({*orders[2]}) >= NUM_DRAWN:
            assert orders[0] != orders[1], "seeds 1 and 2 draw the same order: shuffle by the seed."
            assert orders[0] != orders[2], "data.shuffle: true draws the order of the rows: shuffle by the seed."
        assert orders[2] == orders[3], "with data.shuffle: false, the order depends on the seed."

    def test_another_process_draws_the_same_prompts(self) -> None:
        here, there = self._drawn(), self._elsewhere("_drawn")
        assert here == there, f"another process draws {there} instead of {here}: so would another rank."

    def _drawn(self) -> list[str]:
        """Return the uids of the first training prompts."""
        return [prompt.uid for prompt in self._taken(self._training_prompts(), 2 * NUM_DRAWN)]


def make_prompts(
    source: PromptSource,
    seed: int | str = 1,
    shuffle: bool = True,
    name: str = "",
    rewards: Sequence[Reward] = (),
    max_prompt_tokens: int | None = None,
    too_long: Literal["filter", "refuse"] = "refuse",
) -> TrainingPrompts:
    """Return a source's training prompts as a run makes them."""
    rows = source.for_training(KEY, name)
    rules = PromptRules(make_byte_tokenizer(), (), max_context=1_000_000, max_new_tokens=1, rewards=rewards)
    encoder = PromptEncoder(rules, rows.known, None, None, max_prompt_tokens, too_long)
    return rows.prompts(encoder, shuffle=shuffle, seed=seed)


class _Meeting:
    """Ranks, each in a thread, that exchange arrays."""

    def __init__(self, num_ranks: int) -> None:
        self._arrays: list[Any] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=MEETING_S)

    def of(self, rank: int) -> Callable[[Any], Any]:
        """Return the function that concatenates the arrays of all ranks, for one of them."""

        def gather(array: Any) -> Any:
            self._arrays[rank] = np.asarray(array)
            self._barrier.wait()
            found = np.concatenate(self._arrays)
            self._barrier.wait()  # none begins the next exchange before all have read this one
            return found

        return gather


def _scored(prompts: Sequence[Prompt]) -> list[Sample]:
    """Return a sample of each prompt; every second has a reward of 1, and every third none."""
    return [sample_of(each, index, float(index % 2) if index % 3 else math.nan) for index, each in enumerate(prompts)]


def sample_of(prompt: Prompt, group: int, reward: float) -> Sample:
    """Return a sample; a reward that is NaN has failed."""
    rewards = {"a": RewardError("failed") if math.isnan(reward) else reward}
    return dataclasses.replace(make_sample("made up"), prompt=prompt, group=group, reward=reward, rewards=rewards)


def as_text(state: Any) -> str:
    return json.dumps(state, default=lambda tensor: tensor.tolist())


def of_one_rank(array: Any) -> Any:
    return np.asarray(array)
