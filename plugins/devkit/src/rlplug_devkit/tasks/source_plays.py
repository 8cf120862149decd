"""Checks of training prompts on drawn steps: of any size, with any rewards, resumed and shared by ranks anywhere."""

from __future__ import annotations

import functools
import math
import random
import time
from collections.abc import Sequence
from typing import Any, Final

import pytest

from rlplug.data.prompt_stream import TrainingPrompts
from rlplug.errors import describe
from rlplug.types import Prompt, Sample
from rlplug_devkit.tasks.calls import is_same
from rlplug_devkit.tasks.prompt_rules import PromptRuleChecks, size_of_pass
from rlplug_devkit.tasks.scoring import with_failed
from rlplug_devkit.tasks.training_prompts import as_text, of_one_rank, sample_of

NUM_STEPS: Final = 12
MOST_DRAWN: Final = 9
"""Most prompts of a step."""
OFTEN: Final = 3
"""Every how many steps one draws more."""
MANY: Final = 60
"""Prompts of such a step, so that a small source comes to later passes, each of another order."""
PLAY_S: Final = 10.0
"""Time after which no further step is drawn, in seconds."""
NUM_ALIKE: Final = 3
"""Passes of which all samples have one reward."""
REWARDS: Final = (0.0, 1.0, 1.0, 0.5, -2.0, 1e6, math.nan)
"""Rewards, of which the last is that of an error."""
RUNS: Final[Sequence[tuple[int | str, bool]]] = ((1, True), ("2/part", True), (3, False))
"""Seed and ``data.shuffle``."""


class SourcePlayChecks(PromptRuleChecks):
    """Checks that compare training prompts with themselves in steps that no author has written down."""

    def test_drawn_steps_are_resumed_and_shared(self) -> None:
        """One run goes on, one is resumed after every step, and one has two ranks: they draw and log the same.

        The resumed one has other numbers where rewards failed.
        """
        for seed, shuffle in RUNS:
            draw, kept = random.Random(0), list[Prompt]()
            went_on, resumed, *ranks = (self._training_prompts(seed, shuffle) for _ in range(4))
            states: list[tuple[Any, str]] = []
            longest = went_on.longest_prompt
            began = time.monotonic()
            for step in range(NUM_STEPS):
                if step and time.monotonic() - began > PLAY_S / len(RUNS):
                    break
                number = MANY if step % OFTEN == OFTEN - 1 else draw.randint(1, MOST_DRAWN)
                drawn, *others = (self._taken(each, number) for each in (went_on, resumed, *ranks))
                names = ("resumed after every step", "of two ranks, the first", "of two ranks, the second")
                for name, found in zip(names, others, strict=True):
                    assert is_same(found, drawn), (
                        f"in step {step + 1}, {number} training prompts are {_uids(drawn)}, and those of a run {name} "
                        f"are {_uids(found)}: what draws and samples leave behind belongs into state_dict, and every "
                        "rank learns of all samples through gather_arrays, but for those whose reward failed."
                    )
                assert max(len(prompt.token_ids) for prompt in drawn) <= min(longest, went_on.longest_prompt), (
                    f"in step {step + 1} a prompt is longer than longest_prompt, which was {longest} tokens at the "
                    f"start, and is {went_on.longest_prompt}: name the longest of all that may ever be drawn."
                )
                kept = [*kept[-MOST_DRAWN:], *drawn]
                samples = _scored(draw, kept)
                self._of_training(functools.partial(went_on.observe, samples, of_one_rank))
                self._of_training(functools.partial(resumed.observe, with_failed(samples, 1.0), of_one_rank))
                self._observe_on_ranks(ranks, samples, draw.randint(0, len(samples)))
                self._require_same_metrics(went_on, resumed, step)
                state, resumed = self._state(resumed), self._training_prompts(seed, shuffle)
                self._of_training(functools.partial(resumed.load_state_dict, state))
                lent = self._of_training(went_on.state_dict)
                states.append((lent, as_text(lent)))
            for step, (state, text) in enumerate(states):
                assert as_text(state) == text, (
                    f"what state_dict returned after step {step + 1} has changed since: a checkpoint is written while "
                    "the run goes on, and an undone step is restored from it. Return copies."
                )

    def test_a_state_of_another_process_is_taken(self) -> None:
        """A resumed run is one, with other hashes of texts."""
        state, expected = self._elsewhere("_state_and_draws")
        prompts = self._training_prompts()
        try:
            self._own_thread().run(lambda: prompts.load_state_dict(state))
        except Exception as error:  # noqa: BLE001 - the source's own
            pytest.fail(
                f"load_state_dict of what another process had as its state raised {describe(error)}: make a "
                "fingerprint with hashlib, not with hash() or id().",
                pytrace=False,
            )
        found = _uids(self._taken(prompts, MOST_DRAWN))
        assert found == expected, (
            f"with the state of another process training prompts are {found}, and there they were {expected}."
        )

    def test_prompts_go_on_whatever_all_rewards_are(self) -> None:
        """A policy may solve every prompt, or none: training prompts are endless."""
        for reward in (1.0, 0.0):
            prompts = self._training_prompts()
            size = size_of_pass(prompts)
            for _ in range(NUM_ALIKE):
                drawn = self._taken(prompts, size)
                samples = [sample_of(prompt, group, reward) for group, prompt in enumerate(drawn)]
                self._of_training(functools.partial(prompts.observe, samples, of_one_rank))
            assert len(self._taken(prompts, size)) == size, (
                f"when all rewards were {reward:g}, take returns fewer prompts than it was asked for: begin anew."
            )

    def _state_and_draws(self) -> tuple[Any, list[str]]:
        """Return the state after some draws, and what is drawn behind it."""
        prompts = self._training_prompts()
        self._taken(prompts, MOST_DRAWN)
        return self._state(prompts), _uids(self._taken(prompts, MOST_DRAWN))

    def _require_same_metrics(self, went_on: TrainingPrompts, resumed: TrainingPrompts, step: int) -> None:
        expected, found = ({**self._of_training(each.metrics)} for each in (went_on, resumed))
        assert {name: pytest.approx(value, nan_ok=True) for name, value in expected.items()} == found, (
            f"after step {step + 1} metrics are {expected}, and those of a resumed run {found}: what they count "
            "belongs into state_dict."
        )


def _scored(draw: random.Random, prompts: Sequence[Prompt]) -> list[Sample]:
    """Return up to three samples of some prompts, also of earlier ones, with drawn rewards."""
    samples = []
    for group, prompt in enumerate(draw.sample(prompts, draw.randint(0, len(prompts)))):
        samples += [sample_of(prompt, group, draw.choice(REWARDS)) for _ in range(draw.randint(1, 3))]
    return samples


def _uids(prompts: Sequence[Prompt]) -> list[str]:
    return [prompt.uid for prompt in prompts]
