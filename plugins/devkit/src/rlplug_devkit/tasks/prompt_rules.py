"""Checks that training prompts keep the rules of a run: of their rows, their length, their rewards and their seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import pytest

from rlplug.data.prompt_stream import TrainingPrompts
from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import Reward
from rlplug.types import Prompt, RewardError, Sample
from rlplug_devkit.tasks.calls import is_same
from rlplug_devkit.tasks.draws import MOST_IN_A_PASS, DrawChecks
from rlplug_devkit.tasks.training_prompts import NUM_DRAWN, make_prompts

SEED: Final = "1/part"
"""A mixture's seed of a part."""


class PromptRuleChecks(DrawChecks):
    """Checks of what the ``encoder`` and the ``seed`` that ``prompts`` gets ask of training prompts."""

    def test_prompts_are_of_their_rows(self) -> None:
        """A prompt with another row's answer or metadata is rewarded for another task."""
        rows = self._of_training(lambda: list(self.make_source().for_training("data.train").known))
        by_uid = {row.uid: row for row in rows}
        for prompt in self._taken(self._training_prompts(), 2 * NUM_DRAWN):
            row = by_uid.get(prompt.uid)
            if row is None:
                continue
            for name, found, own in (
                ("answer", prompt.answer, row.answer),
                ("metadata", dict(prompt.metadata), dict(row.metadata)),
            ):
                assert is_same(found, own), f"{prompt.uid}: the prompt has the {name} {found!r}, and its row {own!r}."

    @pytest.mark.parametrize("too_long", ["filter", "refuse"])
    def test_prompts_that_are_too_long_do_not_train(self, too_long: Literal["filter", "refuse"]) -> None:
        """``data.max_prompt_tokens`` is a run's, and ``data.too_long`` says whether longer prompts are refused."""
        prompts = self._training_prompts()
        lengths = sorted({len(prompt.token_ids) for prompt in self._taken(prompts, size_of_pass(prompts))})
        if len(lengths) < 2:
            pytest.skip("does not apply: all prompts have the same length")
        drawn = self._drawn_of(max_prompt_tokens=lengths[-2], too_long=too_long)
        longest = max((len(prompt.token_ids) for prompt in drawn), default=0)
        assert longest <= lengths[-2], (
            f"with data.max_prompt_tokens: {lengths[-2]} and data.too_long: {too_long}, a prompt of {longest} tokens "
            "trains: make prompts with the encoder's usable() or keep()."
        )

    def test_prompts_that_a_reward_refuses_do_not_train(self) -> None:
        """A run without an answer to compare with is refused at its start."""
        drawn = self._drawn_of(rewards=[_RefusesAll()])
        assert not drawn, (
            "prompts train that a reward's check_prompts refuses: make them with the encoder's usable() or check()."
        )

    def test_a_seed_may_be_a_text(self) -> None:
        """A mixture gives each of its parts one."""
        first, again = (self._taken(self._training_prompts(SEED), NUM_DRAWN) for _ in range(2))
        assert is_same(first, again), f"the seed {SEED!r} draws other prompts each time."
        here, there = self._drawn_by_text(), self._elsewhere("_drawn_by_text")
        assert here == there, (
            f"with the seed {SEED!r} another process draws {there} instead of {here}: so would another rank of a "
            "mixture, and a resumed run. Make a number of the seed with hashlib, not with hash()."
        )

    def _drawn_by_text(self) -> list[str]:
        """Return the uids of the first prompts that a seed of text draws."""
        return [prompt.uid for prompt in self._taken(self._training_prompts(SEED), NUM_DRAWN)]

    def _drawn_of(self, **rules: Any) -> Sequence[Prompt]:
        """Return the prompts of a pass by rules of :func:`make_prompts`; none where a run is refused."""

        def draw() -> Sequence[Prompt]:
            try:
                prompts = make_prompts(self.make_source(), **rules)
                return prompts.take(size_of_pass(prompts))
            except (ConfigError, RunError):
                return []

        drawn: Sequence[Prompt] = self._of_training(draw)
        return drawn


def size_of_pass(prompts: TrainingPrompts) -> int:
    """Return the number of prompts of a pass, or of the first ones of a long one."""
    size = prompts.num_prompts
    return 2 * NUM_DRAWN if size is None or size > MOST_IN_A_PASS else size


class _RefusesAll(Reward):
    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        raise ConfigError(f"{len(prompts)} prompts cannot be scored: give others.")

    def score(self, samples: Sequence[Sample]) -> list[float | RewardError]:
        return [0.0] * len(samples)
