"""``judge``: whether a completion gives one of a prompt's accepted answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import mpmath

from rlplug_rewards.answers.arithmetic import DIGITS, as_float
from rlplug_rewards.answers.choices import read_choice, read_choices
from rlplug_rewards.answers.equality import same_answers
from rlplug_rewards.answers.extraction import Found, marked_answer
from rlplug_rewards.answers.notation import clean
from rlplug_rewards.answers.prose import candidates
from rlplug_rewards.answers.reading import read
from rlplug_rewards.answers.splitting import balanced
from rlplug_rewards.answers.values import Items, Quantity, Relation, Value, Words

ASKED: Final = re.compile(r"[^\d=<>,;]*[A-Za-z][^\d=<>,;]*=(?:[^=<>]*=)?")
"""An expression without a number, which a question asks for, such as ``m + n``, ``\\frac{x}{y}`` or ``\\tan A``."""

SENTENCE: Final = re.compile(r"[A-Z][a-z]+\s+[a-z]{2,}\s")
"""Begin of a sentence that an equation ends, as ``He has 10 - 5 = 5``, and that is none itself."""

CONDITION: Final = re.compile(r"(?P<value>[^,;]*[\d)}A-Za-z])\s*\(?\s*«?\s*\b(?:when|for|where|provided|given)\b[^,;]*")
"""A value under one condition, as ``11 for n >= 2``; of several only a function by cases says which is meant."""

ANY_INTEGER: Final = re.compile(
    r"(?<=\S)\s*[,;]?\s*\(?\s*(?:\\text\s*\{\s*(?:where|for|for (?:any|all|some)|with)?\s*\})?\s*"
    r"\b[kmn]\s*(?:\\in|∈)\s*(?:\\mathbb\s*\{?\s*[ZN]\s*\}?|\\Z|[ℤℕ])\s*\)?[\s$.]*$"
)
"""That a symbol of a general solution is any integer, which answers often leave out."""

LABELLED: Final = re.compile(r"«?\s*(?:\([A-J]\)|[A-J][).:])\s*»?\s*(?P<value>\S.*)")
"""An answer behind the letter of its choice, as ``(D) 4``."""

NAMES: Final = re.compile(r"\\(?:angle|triangle|overline|widehat|overrightarrow|partial|parallel|perp|sim)(?![A-Za-z])")
"""Notation whose letters are names in order, which math-verify multiplies: ``\\angle ABC`` is not ``\\angle BAC``."""

LONGEST_WORD: Final = 20
"""Characters of a word in a list; longer ones are pieces of a sentence."""


def reference_text(reference: str) -> str:
    """Return the answer of a reference, which may be a solution that marks it with ``####``, a tag or a box."""
    if "####" in reference:
        return reference.rpartition("####")[2].strip()
    found = marked_answer(reference)
    return reference if found is None else found.text


def judge(references: Sequence[str], found: Found, fallback: Callable[[str, str], bool] | None = None) -> bool:
    """Return whether an answer is one of those accepted.

    Args:
        references: Accepted answers, as they were written.
        found: What is marked as the answer, or prose in which it is looked for.
        fallback: Compares answers that have no other meaning than their notation.
    """
    prose, is_marked = found.text, found.is_marked
    if (chosen := read_choices(prose)) and chosen in map(_letters, references):
        return True
    if is_marked:
        if any(is_same(reference, prose, fallback) for reference in references):
            return True
        if _is_answer(read(prose)) or " " not in prose.strip():
            return False
    letters = [_letter(reference) for reference in references]
    if all(letters):
        return read_choice(prose, is_marked) in letters
    for text in candidates(prose, is_marked):
        if any(is_same(reference, text, fallback) for reference in references):
            return True
        value = read(text)
        if _is_answer(value) and not (_is_equation(value) and SENTENCE.match(text)):
            return False
    return False


def _letter(reference: str) -> str | None:
    """Return the letter of a reference that is one of a multiple choice."""
    letter = re.fullmatch(r"«?\s*\(?([A-J])\)?\s*»?", clean(reference))
    return None if letter is None else letter[1]


def _letters(reference: str) -> frozenset[str]:
    """Return the letters of a reference that is several of a multiple choice, such as ``A, C`` or ``ACD``."""
    is_list = re.fullmatch(r"[\sA-J,;&«»()]*(?:and[\sA-J,;&«»()]*)?", clean(reference)) is not None
    return read_choices(reference) if is_list else frozenset()


def _is_equation(value: Value | None) -> bool:
    return isinstance(value, Relation) or (isinstance(value, Items) and any(map(_is_equation, value.parts)))


def _is_answer(value: Value | None) -> bool:
    """Return whether a part of prose has a meaning of its own, so that no other part is the answer."""
    if isinstance(value, Items):
        words = [part.text for part in value.parts if isinstance(part, Words)]
        if len(words) < len(value.parts):
            return not words and all(map(_is_answer, value.parts))
        return all(" " not in word and len(word) <= LONGEST_WORD for word in words)
    if isinstance(value, Relation) and isinstance(value.right, Words):
        return " " not in value.right.text
    return value is not None and not isinstance(value, Words)


def is_same(reference: str, answer: str, fallback: Callable[[str, str], bool] | None = None) -> bool:
    """Return whether an answer means what a reference means."""
    if same_answers(reference, answer):
        return True
    sides, accepted = approximation(answer), approximation(reference)
    if any(same_answers(one, side) for one in accepted or [reference] for side in sides or [answer]):
        return True
    accepted_alone, alone = ANY_INTEGER.sub("", reference), ANY_INTEGER.sub("", answer)
    if (accepted_alone == reference) != (alone == answer):
        return is_same(accepted_alone, alone, fallback)
    asked = ASKED.match(clean(answer))
    if "=" not in reference and asked is not None and balanced(asked[0]):
        return is_same(reference, clean(answer)[asked.end() :], fallback)
    if (letter := _letter(reference)) is not None and read_choice(answer, is_marked=True) == letter:
        return True
    if (condition := CONDITION.fullmatch(clean(answer))) is not None and not CONDITION.fullmatch(clean(reference)):
        return is_same(reference, condition["value"].strip(" \\(«"), fallback)
    if (labelled := LABELLED.fullmatch(clean(answer))) is not None and not LABELLED.fullmatch(clean(reference)):
        return is_same(reference, labelled["value"], fallback)
    if fallback is None or not is_notation(reference) or not is_notation(answer):
        return False
    if NAMES.search(clean(reference)) or NAMES.search(clean(answer)):
        return False
    return fallback(reference, answer)


def approximation(answer: str) -> list[str]:
    r"""Return both sides of ``2\sqrt{3} \approx 3.46`` where the second is near the first, else nothing."""
    sides = clean(answer).split(r"\approx")
    if len(sides) != 2:
        return []
    exact, about = map(read, sides)
    if not isinstance(exact, Quantity) or not isinstance(about, Quantity):
        return []
    value, near, places = exact.expression.value, about.expression.value, about.expression.places
    if value is None or near is None or places is None:
        return []
    scale = 100 if about.is_percent and not exact.is_percent else 1
    with mpmath.workdps(DIGITS):
        error = abs(scale * as_float(value) - as_float(near))
        return sides if error < mpmath.mpf(10) ** -places[0] else []


def is_notation(text: str) -> bool:
    """Return whether a text has no meaning here but its notation, as an integral or a sum has."""
    value = read(text)
    return isinstance(value, Words) and value.is_literal and re.search(r"\\[A-Za-z]", value.text) is not None
