"""``AnswerReward``: what rewards share that compare the answer in a completion with that of the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from rlplug.errors import ConfigError
from rlplug.interfaces.reward import Reward
from rlplug.types import Prompt, RewardError, Sample
from rlplug_rewards.answers.extraction import Found, after_thought, begins_thought, marked_answer
from rlplug_rewards.patterns import compile_answer_pattern, last_match
from rlplug_rewards.requests.counts import Counts


class AnswerReward(Reward):
    r"""Base class of rewards that compare the answer in a completion with the prompt's.

    The answer is in the policy's last turn, after its thought: see :mod:`rlplug_rewards.answers.extraction`.

    Args:
        answer_pattern: Regular expression with a capture group: the first group of its last match is the answer, and
            nothing else is. By default the answer is what a tag or ``\boxed{}`` marks, or what the text says.
        finished_only: Give 0 to completions that a limit of tokens or turns cut off.
        marked_only: Give 0 where nothing marks the answer.
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics (``reward/<name>``); the class name in lower case by default.

    Attributes:
        found: Counts of answers that are ``marked``, ``in_prose`` and ``missing``: prose is read with less certainty.
    """

    needs_answer = True
    """Whether a prompt without an answer is an error."""

    def __init__(
        self,
        answer_pattern: str | None = None,
        finished_only: bool = False,
        marked_only: bool = False,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        reward = type(self).__name__
        self.answer_pattern = None if answer_pattern is None else compile_answer_pattern(reward, answer_pattern)
        self.finished_only = finished_only
        self.marked_only = marked_only
        self.found = Counts()

    def score(self, samples: Sequence[Sample]) -> list[float | RewardError]:
        return [self._score(sample) for sample in samples]

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        super().check_prompts(prompts)
        for prompt in prompts:
            try:
                self.check_prompt(prompt)
            except ValueError as problem:
                raise ConfigError(
                    f"reward {self.name!r} cannot use the answer of prompt {prompt.uid!r}: {problem}. Correct the row, "
                    "or leave it out."
                ) from problem

    def check_prompt(self, prompt: Prompt) -> None:
        """Check the answer of a prompt.

        Raises:
            ValueError: No completion can be compared with it.
        """

    def score_answer(self, prompt: Prompt, found: Found) -> float | RewardError:
        """Return the reward of an answer, or of the rest of a completion in which nothing is marked.

        Raises:
            ValueError: The prompt's answer cannot be compared with.
        """
        raise NotImplementedError

    def _score(self, sample: Sample) -> float | RewardError:
        if self.needs_answer and sample.prompt.answer is None:
            return missing_answer(type(self).__name__)
        try:
            found = self._found(sample)
            self.found.add(
                marked=found is not None and found.is_marked,
                in_prose=found is not None and not found.is_marked and not found.is_cut_off,
                missing=found is None or found.is_cut_off,
            )
            return 0.0 if found is None else self.score_answer(sample.prompt, found)
        except ValueError as problem:
            return RewardError(f"the prompt's answer cannot be used: {problem}")

    def _found(self, sample: Sample) -> Found | None:
        """Return the answer of a sample, or ``None`` where there is none."""
        is_cut_off = sample.finish_reason != "stop"
        if is_cut_off and self.finished_only:
            return None
        rest = after_thought(sample.last_turn or sample.completion, begins_thought(sample.prompt.text))
        if rest is None:
            return None
        if self.answer_pattern is not None:
            match = last_match(self.answer_pattern, rest)
            return None if match is None else Found(match, True)
        marked = marked_answer(rest, is_cut_off)
        return marked if marked is not None or self.marked_only else Found(rest, False, is_cut_off)


def missing_answer(reward: str) -> RewardError:
    """Return the error for a prompt without an answer."""
    return RewardError(f"the prompt has no answer to compare with: give {reward} prompts with an 'answer'")
