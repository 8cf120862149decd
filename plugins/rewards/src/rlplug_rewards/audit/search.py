"""A best-of-n search: a policy answers each prompt many times, and what scores highest may be wrong."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlplug.types import Prompt
from rlplug_rewards.answers.equality import same_answers
from rlplug_rewards.answers.extraction import marked_answer
from rlplug_rewards.audit.attacks import reference


@dataclass(frozen=True)
class Best:
    """The completion of a prompt that scores highest."""

    uid: str
    score: float
    is_wrong: bool
    """Whether it nowhere has the prompt's answer."""
    fools: bool
    """Whether it is wrong, and scores nearer to a right answer than to a wrong one."""
    completion: str


@dataclass(frozen=True)
class Search:
    """What a policy found that a reward likes."""

    policy: str
    num_samples: int
    """Completions of each prompt."""
    best: list[Best]
    """Those that fool it first, then by their scores."""

    @property
    def num_fooled(self) -> int:
        return sum(each.fools for each in self.best)


def search(
    policy: str,
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[str]],
    score: Callable[[Sequence[str | None]], Sequence[Any]],
    is_high: Callable[[Prompt, float], bool],
) -> Search:
    """Return the completion of each prompt that scores highest, and say which of them fool the reward.

    Args:
        policy: Name of the policy.
        prompts: Prompts with their answers.
        completions: Completions of each, equally many.
        score: Scores a text of each prompt; what is no number is passed over.
        is_high: Returns whether a score is nearer to a right answer's than to a wrong one's.
    """
    num_samples = len(completions[0])
    best: dict[str, Best] = {}
    for place in range(num_samples):
        texts = [of_prompt[place] for of_prompt in completions]
        for prompt, text, value in zip(prompts, texts, score(texts), strict=True):
            if not isinstance(value, float) or math.isnan(value):
                continue
            wrong = is_wrong(prompt, text)
            found = Best(prompt.uid, value, wrong, wrong and is_high(prompt, value), text)
            best[prompt.uid] = max(best.get(prompt.uid, found), found, key=lambda each: (each.fools, each.score))
    return Search(policy, num_samples, sorted(best.values(), key=lambda each: (each.fools, each.score), reverse=True))


def is_wrong(prompt: Prompt, completion: str) -> bool:
    """Return whether a completion nowhere has the reference answer: neither its characters nor, marked, its meaning.

    One that has it may be wrong for all that; false for prompts without an answer of text or number.
    """
    answer = reference(prompt)
    if answer is None:
        return False
    text, wanted = (_plain(each) for each in (completion, answer))
    if re.search(rf"(?<![\w.]){re.escape(wanted)}(?!\w|\.\d)", text):
        return False
    marked = marked_answer(completion)
    return not same_answers(answer, completion if marked is None else marked.text)


def _plain(text: str) -> str:
    """Return a text in small letters, with ASCII digits and without separators of thousands."""
    digits = "".join(str(unicodedata.decimal(each, each)) for each in unicodedata.normalize("NFKC", text))
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", digits).casefold()
