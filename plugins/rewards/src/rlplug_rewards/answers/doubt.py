"""Words with which a sentence denies, doubts or supposes what it says, so that it gives no answer."""

from __future__ import annotations

import re
from typing import Final

DENIALS: Final = (
    r"not|cannot|\w+n['’]t|neither|nor|either|unless|impossible to|incorrect|wrong|mistaken|fail(?:s|ed)?|unable"
    r"|nothing|eliminate|rule out|ruled out|depends? on"
)
GUESSES: Final = (
    r"unsure|unknown|unclear|maybe|perhaps|possibly|might|may be|could|guess|no idea|confidence|should i|i think it"
    r"|between\s+\\?[$€£]?-?\d|tempting|naive(?:ly)?|or so|remind(?:s|ed)|more information"
)
SUPPOSITIONS: Final = (
    r"if|whether|suppose|assum(?:e|ing)|for (?:example|instance)|e\.g\.|such as|let['’]?s|let|please|need (?:to|more)"
    r"|want to|verify|consider|try|trying"
    r"|to (?:solve|check|prove|show|find|compute|handle)"
    r"|(?:the|this) (?:problem|question|exercise) (?:has|asks|says|states|gives|mentions)"
)
DENIED: Final = re.compile(rf"\b(?:{DENIALS})\b", re.IGNORECASE)
DOUBT: Final = re.compile(rf"\b(?:{DENIALS}|{GUESSES}|{SUPPOSITIONS})(?!\w)|\?\s*$", re.IGNORECASE)
SUPPOSED: Final = re.compile(
    rf"\b(?:incorrect|wrong|mistaken|{GUESSES}|(?:if|had)\b.*\b(?:were|had been)"
    r"|common(?=\s+(?:answer|mistake|error|guess))|(?:some|one|you|people|students?|many)\b.*\b(?:might|may|would"
    r"|could|say|think|answer))\b",
    re.IGNORECASE,
)
"""What stands in a clause before an answer that is not the one given: ``A common wrong answer is 7.``"""
CONDITIONAL: Final = re.compile(
    r"(?:^|[.!?\n]\s*)(?:if|had|were|suppose|supposing|assuming|without|ignoring)\b[^.!?\n]*$", re.IGNORECASE
)
CLAUSE: Final = re.compile(
    r"(?<!\.\w)[.!?](?=\s)|(?<!\\);|\n|,?\s*\b(?:but|however|though|although|while|whereas)\b,?", re.IGNORECASE
)
"""What ends a clause, so that its doubts are not those of the next."""


def denies(text: str) -> bool:
    """Return whether a text denies what it says."""
    return DENIED.search(_in_words(text)) is not None


def doubts(text: str) -> bool:
    """Return whether a text denies, doubts, supposes or asks what it says."""
    return DOUBT.search(_in_words(text)) is not None


def is_supposed(text: str) -> bool:
    """Return whether the clause that a text ends with speaks of an answer that is not the one given."""
    return SUPPOSED.search(last_clause(text)) is not None


def is_conditional(text: str) -> bool:
    """Return whether the sentence that a text ends with begins with a condition."""
    return CONDITIONAL.search(text) is not None


def last_clause(text: str) -> str:
    """Return what follows the last mark or word that begins a clause against the one before it."""
    return CLAUSE.split(text)[-1]


def _in_words(text: str) -> str:
    """Return a text without commands, and without what a relative clause denies of some, who are no answer."""
    return re.sub(r"\\[a-zA-Z]+|\b(?:who|that|which) (?:are|do|does|did|have|has|is|was|were) not\b", " ", text)
