"""Reference answers of any type, as the texts that are accepted."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any, Final

from rlplug_rewards.answers.judging import is_notation, reference_text
from rlplug_rewards.answers.reading import read
from rlplug_rewards.answers.values import Items, Value, Words

PLAIN: Final = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?")
"""Numbers that need no reading: most references of large data sets."""
MOST_WORDS: Final = 6
"""Most words of an answer in words."""


def accepted_answers(answer: Any) -> list[Any]:
    """Return the answers that are accepted, each a text, a number, a truth value or an object.

    Args:
        answer: One answer, or a list (tuple, set, array) of those that are accepted.

    Raises:
        ValueError: There is none, or one is NaN, infinite, empty, or a list in a list.
    """
    answers = _plain(answer)
    if not isinstance(answers, list):
        answers = [answers]
    if not answers:
        raise ValueError("the list of accepted answers is empty")
    for each in answers:
        if each is None:
            raise ValueError("there is no answer")
        if isinstance(each, list):
            raise ValueError(f"{each!r} is a list in a list of accepted answers: write a set or a tuple as text")
        if isinstance(each, float) and not math.isfinite(each):
            raise ValueError(f"{each} is no answer: it stands for one that is missing")
        if isinstance(each, str) and not each.strip():
            raise ValueError("the answer is an empty text")
    return answers


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # of NumPy or torch
        value = value.tolist()
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return value


def as_text(answer: Any) -> str:
    """Return an answer as text: 12.0 as ``12``, and 1e-05 as ``0.00001``.

    Raises:
        ValueError: It is an object.
    """
    if isinstance(answer, bool):
        return str(answer).lower()
    if isinstance(answer, float):
        return format(Decimal(str(answer)).normalize(), "f")
    if isinstance(answer, dict):
        raise ValueError(f"{answer!r} is an object and no answer: name its field with answer_key")
    return str(answer)


def as_mathematics(answer: str) -> str:
    """Return the text of a reference answer without the solution that may stand around it.

    Raises:
        ValueError: It has no meaning: brackets do not match, or it is a solution that does not mark its answer.
    """
    if PLAIN.fullmatch(answer):
        return answer
    text = reference_text(answer)
    value = read(text)
    if value is None:
        raise ValueError(f"{answer!r} is no answer that can be read")
    if _is_prose(value):
        raise ValueError(f"{answer!r} is prose: give the answer alone, or mark it with #### or \\boxed{{}}")
    return text


def _is_prose(value: Value, most: int = MOST_WORDS) -> bool:
    if isinstance(value, Items):
        return any(_is_prose(part, MOST_WORDS // 2) for part in value.parts)
    return isinstance(value, Words) and not value.is_literal and len(value.text.split()) > most


def needs_fallback(reference: str) -> bool:
    """Return whether a reference is notation that only math-verify can read, such as an integral."""
    return is_notation(reference)
