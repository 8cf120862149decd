"""Answers in words: those that name a value, dates, and words that are compared as such."""

from __future__ import annotations

import re
from typing import Final

from rlplug_rewards.answers.expressions import read_expression
from rlplug_rewards.answers.notation import compact
from rlplug_rewards.answers.quantities import expression_of
from rlplug_rewards.answers.regions import ALL, INFINITY, MINUS_INFINITY, read_region
from rlplug_rewards.answers.values import NOTHING, Clock, Quantity, Value, Words

CONSTANT_WORDS: Final[dict[str, Value]] = {
    **dict.fromkeys(
        ("no solution", "no solutions", "no solution exists", "no solutions exist",
        "no real solution", "no real solutions", "empty set", "emptyset", "empty",
         "there is no solution", "there are no solutions", "has no solution", "no such x", "no such x exists",
         "none exist", "there are none", "none"), NOTHING),
    **dict.fromkeys(
        ("all real numbers", "all reals", "all real number", "all real x", "all real values", "reals",
            "real numbers", "any real number", "mathbb r",
         "every real number", "set of all real numbers", "set of real numbers", "all real values of x",
             "x is any real number", "x in mathbb r"), ALL),
    **dict.fromkeys(("dne", "does not exist", "limit does not exist", "doesn't exist", "undefined",
        "not defined"), Words("dne")),
    **dict.fromkeys(("infinitely many", "infinitely many solutions", "infinite", "infinite solutions",
        "infinite number of solutions"), Words("infinite")),
    **dict.fromkeys(("yes", "true", "correct"), Words("true")),
    **dict.fromkeys(("no", "false"), Words("false")),
    **dict.fromkeys(("infinity", "positive infinity", "plus infinity"), Quantity(INFINITY)),
    **dict.fromkeys(("negative infinity", "minus infinity"), Quantity(MINUS_INFINITY)),
    "pi": Quantity(read_expression(r"\pi")),
    **dict.fromkeys(("noon", "12 noon", "midday"), Clock(43200, True)),
    **dict.fromkeys(("midnight", "12 midnight"), Clock(0, True)),
}  # fmt: skip
EXCEPT: Final = re.compile(
    r"«?\s*(?:the set of )?(?:all|any|every) real(?:s| numbers?| values?)?(?: x)?,?\s*(?:except|but|other than"
    r"|excluding)(?: for)?"
    r"\s*(?:x\s*=)?\s*»?\s*(?:x\s*=)?\s*([^»]+?)\s*»?",
    re.IGNORECASE,
)
MONTH: Final = "january|february|march|april|may|june|july|august|september|october|november|december"
DATE: Final = re.compile(
    rf"(?:(?P<month>{MONTH}) (?P<day>\d{{1,2}})(?:st|nd|rd|th)?"
    rf"|(?P<first>\d{{1,2}})(?:st|nd|rd|th)?(?: of)? (?P<then>{MONTH}))(?P<year>,? \d{{4}})?"
)
SIGNED: Final = {"positive": "> 0", "negative": "< 0", "nonnegative": r"\ge 0", "nonpositive": r"\le 0"}
REALS: Final = re.compile(
    r"(?:set of )?(?:all |any |every )?(?:(?P<sign>(?:non-?)?(?:positive|negative)) real(?:s| numbers?)(?: x)?"
    r"|real(?:s| numbers?)(?: x)?(?: that are)? (?P<order>greater|larger|more|less|smaller) than"
    r"(?P<closed> or equal to)? (?P<bound>\S+))",
    re.IGNORECASE,
)
"""Sets of real numbers in words: ``all non-negative real numbers``, ``real numbers less than 3``."""
SUCH_THAT: Final = re.compile(
    r"(?:set of )?(?:all |any |every )?real (?:numbers?|values?)(?: of)? [a-z] "
    r"(?:such that|with|for which|where|satisfying) (.+)"
)
"""Real numbers and the condition that they satisfy."""
CLASSES: Final = re.compile(r"(?<=\w) (?:functions?|triangles?|angles?|numbers?|integers?|quadrilaterals?)$")
"""What kind of thing an answer names a property of: an odd function is odd."""
ARTICLES: Final = re.compile(r"\b(?:the|a|an)\b")


def read_constant(text: str) -> Value | None:
    """Read words and signs that name a value, such as "no solution", "all real numbers except 2" or "midnight"."""
    if text in ("⦃⦄", r"\emptyset", r"⦃ ⦄"):
        return NOTHING
    if text == r"\mathbb{R}" or text == r"\mathbb R":
        return ALL
    if (excepted := EXCEPT.fullmatch(text)) is not None:
        return read_region(rf"x \ne {excepted[1]}".replace(" and ", ", "))
    plain = " ".join(ARTICLES.sub(" ", re.sub(r"[«»]", " ", text)).split())
    if DATE.fullmatch(plain.casefold()) is not None:
        return Words(_folded(plain))
    if (condition := SUCH_THAT.fullmatch(plain)) is not None:
        return read_region(condition[1])
    if (reals := REALS.fullmatch(plain)) is not None:
        if reals["sign"]:
            return read_region(f"x {SIGNED[reals['sign'].replace('-', '')]}")
        sign = "<" if reals["order"] in ("less", "smaller") else ">"
        return read_region(f"x {sign}{'=' * bool(reals['closed'])} {reals['bound']}")
    if not re.fullmatch(r"(?:12\s)?[«A-Za-z][A-Za-z\s'«».{}\\]*", text):
        return None
    return CONSTANT_WORDS.get(_folded(text.removeprefix("x \\in ")))


def read_words(text: str) -> Value | None:
    """Read words, or a notation that has no other meaning, to be compared literally."""
    if re.search(r"\\[A-Za-z]", text) or (re.search(r"[\^{}=<>⦃⦄_]", text) and "«" not in text):
        return Words(compact(text), is_literal=True)
    folded = CLASSES.sub("", _folded(text))
    product = expression_of(text) if re.fullmatch(r"[A-Za-z]{2,3}", text) else None
    return (
        Words(folded, product=product)
        if folded and re.search(r"[^\W\d]", folded)
        else Words(compact(text), is_literal=True)
    )


def _folded(text: str) -> str:
    text = re.sub(r"[«»\"`*_{}\\,.;:!?()]|^\W+|\W+$", " ", text.casefold())
    folded = " ".join(ARTICLES.sub(" ", text).split())
    if (date := DATE.fullmatch(folded)) is not None:
        return f"{date['month'] or date['then']} {int(date['day'] or date['first'])}{date['year'] or ''}"
    return folded
