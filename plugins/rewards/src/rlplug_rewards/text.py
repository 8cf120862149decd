"""Rewards that compare text: equality with the reference answer, and the shape of the completion."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

from rlplug.interfaces.reward import Reward
from rlplug.types import Prompt, RewardError, Sample
from rlplug_rewards.answer_reward import AnswerReward
from rlplug_rewards.answers.extraction import Found
from rlplug_rewards.answers.references import accepted_answers
from rlplug_rewards.patterns import compile_pattern

NUMBER: Final = re.compile(r"\s*[+-]?(?:\d{1,4000}(?:\.\d{0,4000})?|\.\d{1,4000})(?:[eE][+-]?\d{1,3})?\s*")


class ExactMatch(AnswerReward):
    r"""Reward of 1.0 when the answer in a completion is the prompt's, or one of its list, else 0.0.

    Text is compared as text, with what a tag or box marks and with all that follows a thought. A number is equal to
    every way to write it (12.0 to ``12``), true to ``true`` and ``True``, an object to its JSON. A prompt without an
    answer is an error, and so is one with NaN.

    Args:
        strip: Ignore white space around both texts.
        ignore_case: Compare without regard to upper and lower case.
        answer_pattern: Regular expression with a capture group: the first group of its last match after the thought is
            the answer, and nothing else is. By default, it is what a tag or ``\boxed{}`` marks, or the whole text.
        finished_only: Give 0 to completions that a limit of tokens or turns cut off.
        marked_only: Give 0 where nothing marks the answer.
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics (``reward/<name>``); ``exactmatch`` by default.
    """

    def __init__(
        self,
        strip: bool = True,
        ignore_case: bool = False,
        answer_pattern: str | None = None,
        finished_only: bool = False,
        marked_only: bool = False,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(answer_pattern, finished_only, marked_only, weight, name)
        self.strip = strip
        self.ignore_case = ignore_case

    def check_prompt(self, prompt: Prompt) -> None:
        accepted_answers(prompt.answer)

    def score_answer(self, prompt: Prompt, found: Found) -> float | RewardError:
        texts = {found.text, found.whole}
        return float(any(self._is_equal(answer, text) for answer in accepted_answers(prompt.answer) for text in texts))

    def _is_equal(self, answer: Any, text: str) -> bool:
        if isinstance(answer, bool):
            return text.strip().casefold() == str(answer).casefold()
        if isinstance(answer, int | float):
            return NUMBER.fullmatch(text) is not None and Fraction(text.strip()) == Fraction(str(answer))
        if isinstance(answer, Mapping):
            try:
                return bool(json.loads(text) == answer)
            except (ValueError, RecursionError):
                return False
        return self._normalised(text) == self._normalised(str(answer))

    def _normalised(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


class RegexFormat(Reward):
    """Reward of 1.0 when the completion matches a format, else 0.0.

    Args:
        pattern: Regular expression. Write ``(?s)`` in front to let ``.`` match line ends.
        full_match: Require the whole completion to match; otherwise a match anywhere in it is enough.
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics (``reward/<name>``); ``regexformat`` by default.
    """

    def __init__(self, pattern: str, full_match: bool = True, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        self.pattern = compile_pattern("RegexFormat.pattern", pattern)
        self.full_match = full_match

    def score(self, samples: Sequence[Sample]) -> list[float | RewardError]:
        match = self.pattern.fullmatch if self.full_match else self.pattern.search
        return [float(match(sample.completion) is not None) for sample in samples]
