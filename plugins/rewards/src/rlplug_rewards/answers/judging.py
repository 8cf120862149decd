"""``judge``: whether a completion gives one of a prompt's accepted answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rlplug_rewards.answers.choices import read_choice
from rlplug_rewards.answers.equality import same_answers
from rlplug_rewards.answers.extraction import Found
from rlplug_rewards.answers.notation import clean
from rlplug_rewards.answers.prose import candidates
from rlplug_rewards.answers.reading import read
from rlplug_rewards.answers.values import Words


def judge(references: Sequence[str], found: Found | None, prose: str | None, fallback: Callable[[str, str], bool] | None = None) -> bool:
    """Return whether an answer is one of those accepted.

    Args:
        references: Accepted answers, as they were written.
        found: What is marked as the answer, or ``None``.
        prose: Text in which an answer that is not marked is looked for, or ``None``.
        fallback: Compares answers that have no other meaning than their notation.
    """
    if found is not None:
        return any(is_same(reference, found.text, fallback) for reference in references)
    if prose is None:
        return False
    letters = [clean(reference) for reference in references]
    if all(re.fullmatch(r"\(?[A-J]\)?", letter) for letter in letters):
        choice = read_choice(prose)
        return choice is not None and any(choice == letter.strip("()") for letter in letters)
    for text in candidates(prose):
        if any(is_same(reference, text, fallback) for reference in references):
            return True
        value = read(text)
        if value is not None and not isinstance(value, Words):
            return False  # this was the answer
    return False


def is_same(reference: str, answer: str, fallback: Callable[[str, str], bool] | None = None) -> bool:
    """Return whether an answer means what a reference means."""
    if same_answers(reference, answer):
        return True
    letter = re.fullmatch(r"\(?([A-J])\)?", clean(reference))
    if letter is not None and read_choice(answer, is_marked=True) == letter[1]:
        return True
    if fallback is None or not is_notation(reference) or not is_notation(answer):
        return False
    return fallback(reference, answer)


def is_notation(text: str) -> bool:
    """Return whether a text has no meaning here but its notation, as an integral or a sum has."""
    value = read(text)
    return isinstance(value, Words) and value.is_literal and re.search(r"\\[A-Za-z]", value.text) is not None
