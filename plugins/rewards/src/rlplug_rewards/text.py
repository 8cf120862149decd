"""Rewards that compare text: equality with the reference answer, and the shape of the completion."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlplug.errors import ConfigError
from rlplug.interfaces.reward import Reward
from rlplug.types import RewardError, Sample


class ExactMatch(Reward):
    """Reward of 1.0 when the completion equals the prompt's answer, else 0.0; a prompt without an answer is an error.

    Args:
        strip: Ignore white space around both texts.
        ignore_case: Compare without regard to upper and lower case.
        answer_pattern: Regular expression with a capture group. The first group of its last match in the completion
            is compared instead of the whole completion, and a completion without a match scores 0.0.
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics (``reward/<name>``); ``exactmatch`` by default.
    """

    needs_answer = True

    def __init__(
        self,
        strip: bool = True,
        ignore_case: bool = False,
        answer_pattern: str | None = None,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        self.strip = strip
        self.ignore_case = ignore_case
        self.answer_pattern = None if answer_pattern is None else compile_answer_pattern("ExactMatch", answer_pattern)

    def score(self, samples: Sequence[Sample]) -> list[float | RewardError]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> float | RewardError:
        if sample.prompt.answer is None:
            return missing_answer("ExactMatch")
        found: str | None = sample.completion
        if self.answer_pattern is not None:
            found = last_match(self.answer_pattern, sample.completion)
        if found is None:
            return 0.0
        return float(self._normalised(found) == self._normalised(str(sample.prompt.answer)))

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


def compile_pattern(key: str, pattern: str) -> re.Pattern[str]:
    """Compile a user's regular expression.

    Raises:
        ConfigError: It does not compile; the message names ``key`` and the position in the pattern.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{key} is {pattern!r}, which is not a valid regular expression: {error}. Correct it; a literal special "
            "character needs a backslash, and YAML keeps backslashes inside single quotes."
        ) from error


def compile_answer_pattern(reward: str, pattern: str) -> re.Pattern[str]:
    """Compile an ``answer_pattern``, which needs a capture group."""
    key = f"{reward}.answer_pattern"
    compiled = compile_pattern(key, pattern)
    if compiled.groups == 0:
        raise ConfigError(
            f"{key} is {pattern!r}, which has no capture group: put parentheses around the answer, "
            r"such as '<answer>(.*?)</answer>'."
        )
    return compiled


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the first group of the last match, or ``None`` when there is none."""
    found: str | None = None
    for match in pattern.finditer(text):
        found = match.group(1)
    return found


def missing_answer(reward: str) -> RewardError:
    """Return the error for a prompt without an answer."""
    return RewardError(f"the prompt has no answer to compare with: give {reward} prompts with an 'answer'")
