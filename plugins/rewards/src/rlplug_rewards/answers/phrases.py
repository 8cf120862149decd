"""Values in prose: numbers with their units, dates, times, mathematics and names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from rlplug_rewards.answers.numerals import NUMBER_WORDS
from rlplug_rewards.answers.wording import DATE

NUMBER: Final = r"[-−]?\\?[$€£]?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?(?![A-Za-z\d_/^])"
VALUE: Final = re.compile(
    rf"\b(?:{DATE.pattern})\b"
    r"|(?<![A-Za-z\d_.:])\d{1,2}(?::\d{2}(?:\s*[ap]\.?m\b\.?)?|\s*[ap]\.?m\b\.?)(?!\w)"
    rf"|(?<![A-Za-z\d_.]){NUMBER}",
    re.IGNORECASE,
)
"""A date, a time or a number."""
IN_WORDS: Final = re.compile(
    rf"\b(?!one\b(?!-))(?:{NUMBER_WORDS})(?:(?:-|\s+(?:and\s+)?)(?:{NUMBER_WORDS}|thirds?|quarters?|fifths?))*\b",
    re.IGNORECASE,
)
MATHEMATICS: Final = re.compile(r"\$([^$\n]+)\$")
PHRASE: Final = re.compile(
    rf"((?>{NUMBER})|\$[^$\n]+\$)"
    r"(?!\$?\s*(?:[~)]|[.\s]\d|[-+*/×÷^=<>(]|(?:,|,?\s*(?:and|or|to))\s+\\?[$€£]?\d"
    r"|(?:times|plus|minus|divided|multiplied|(?:more|less|fewer|\w+er) than|or (?:more|less|fewer|so)|squared|cubed"
    r"|(?:in )?base|mod|choose|is|are|was|remains?)\b))"
    r"((?:\s+(?!(?:for|in|after|from|by|with|at|during|to|of|per|each|more|left|on|this|who|that|and)\b)[a-z]+){0,3}+)"
    r"(?!,?\s+and\b)",
    re.IGNORECASE,
)
"""A number that nothing behind it changes, and up to three words that it counts, as in ``16 cups for $64``."""
ADVERBS: Final = re.compile(
    r"^(?:\s|[*_:=,]|\b(?:us|therefore|thus|hence|simply|just|indeed|clearly|then|so|now|exactly|only|equal to"
    r"|equals|given by|left with|is|are|that|the|at|on|by|an?(?=\s+[\d$\\A-Z])|option|choice|letter|found to be"
    r"|a total of|in total|also|of course|definitely|probably)\b[,:]?)+",
    re.IGNORECASE,
)
"""What may stand between a verb and a value."""
BOUND: Final = re.compile(
    r"\b(?:at least|at most|case|cases|question|problem|step|stuck|up at|example|given|(?:more|less|other|\w+er) than"
    r"|up to|or (?:more|less|fewer)|squared|cubed|root of|(?:half|twice|double) (?:of )?\d+|base|equation|figure|page"
    r"|section|\d+\$? (?:is|are|was|were|has|have) (?!the\b)[a-z]+)\b|[<>]|\\[lg]eq?\b",
    re.IGNORECASE,
)
"""What makes a number of a sentence none that it gives."""
OPERATION: Final = re.compile(r"\d[^\s/]*[=+*^]|[=+*^]\s*\d|/\s")
NAME: Final = re.compile(
    r"([A-Z]\w+)\s+(?:(?:is|has|was|had)\s+the\s+(?:most|least|best|winner|\w+est)|finished\s+(?:first|last))\b"
    r"|\b(?:on|of|represents|reach)\s+(?:an?\s+)?([A-Za-z]{3,})\W*$"
)
"""A name that is the one asked for, or the word that a sentence ends with: ``Evelyn has the most``, ``on a Monday``."""
LONGEST: Final = 400
"""Characters of a sentence whose only value is its answer."""


def has_value(text: str) -> bool:
    """Return whether a text has a value."""
    return any(pattern.search(text) for pattern in (VALUE, MATHEMATICS, IN_WORDS))


def phrases(text: str) -> Iterator[str]:
    """Yield a text without the words around an answer; the number that it begins with, with its unit; the number."""
    text = re.sub(r"\s+(?:left|remaining|more)$", "", ADVERBS.sub("", text, count=1).strip().rstrip(" .!*_"))
    if text.count("}") > text.count("{"):  # of JSON
        text = text.rstrip("}\"' \n").lstrip("\"'")
    yield text[:-1] if text.endswith(")") and text.count(")") > text.count("(") else text
    if (phrase := PHRASE.match(text)) is not None:
        yield phrase[0]
        yield phrase[1]


def only_value(clause: str) -> Iterator[str]:
    """Yield the only mathematics of a clause, or else its only value."""
    if len(clause) > LONGEST or BOUND.search(clause):
        return
    mathematics = [part for part in MATHEMATICS.findall(clause) if len(part.strip()) > 1 or part.strip().isdigit()]
    values = list(VALUE.finditer(clause)) or list(IN_WORDS.finditer(clause))
    if len(mathematics) == 1:
        yield mathematics[0]
    elif not mathematics and len(values) == 1 and not OPERATION.search(clause):
        yield values[0][0].rstrip(",")


def names(sentence: str) -> Iterator[str]:
    """Yield the name, or the last word, that is the answer of a sentence without a value."""
    if (name := NAME.search(sentence)) is not None:
        yield name[1] or name[2]
