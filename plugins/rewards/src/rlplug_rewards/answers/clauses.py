"""Clauses of a sentence: the main one, without what supports it, says what the sentence gives."""

from __future__ import annotations

import re
from typing import Final

from rlplug_rewards.answers.phrases import has_value

VERB: Final = re.compile(
    r"\b(?:is|are|was|were|be|holds?|equals|total of|gives?|gets?|yields|obtain|becomes|has|have|needs?|makes?|made"
    r"|pays?|paid|spends?|spent|takes?|took|sells?|sold|buys?|bought|eats?|ate|drinks?|drank|runs?|ran|reads?)\b"
    r"|\b[a-z]{3,}(?<!plus)(?<!minus)(?<!times)(?:s|ed)\b(?=\s+\\?[$€£]?\d)"
    r"|(?<!\d\s)(?<!\bequal\s)\bto(?=\s+\\?[-−$€£\d])|=|:(?!\d)|(?<!\d):|\\implies|\\Rightarrow|⇒|→",
    re.IGNORECASE,
)
"""A verb, or a sign in place of one, that an answer may follow."""
LEAD: Final = re.compile(
    r"^(?:(?:[=-]>|[⇒⟹→∴]|(?:so|thus|therefore|hence|then|and|finally|now|overall|altogether|consequently"
    r"|accordingly|in total|in conclusion|as a result|to conclude|it follows|this gives|giving"
    r"|we (?:get|have|find|obtain|see|conclude)|i g[eo]t|it is|it's|that's|this is|that is|there (?:is|are)"
    r"|which (?:is|equals)|it equals|that)\b)[,:]?\s*)+",
    re.IGNORECASE,
)
"""Words that lead to a conclusion."""
CONSEQUENCE: Final = re.compile(
    r",\s+for\s+(?=\\?[$€£]?\d)|,?\s+(?:so(?! that| far| much| many)|for a (?:grand )?total of|thus|hence|therefore"
    r"|and(?= \S+ (?:in total|in all|altogether)\W*$)|giving|meaning(?: that)?"
    r"|which (?:gives|means|is(?! \S+ (?:more|less|fewer))|equals|brings)"
    r"|we (?:conclude|find|get|obtain)(?: that)?)\s+",
    re.IGNORECASE,
)
"""What joins a conclusion to what it follows from."""
BREAK: Final = re.compile(
    r",?\s*(?=[(—–]\s*[a-zA-Z]{3})|(?<=[\da-z])\s+(?=\((?:\d+|[\d $]+[-+*/=×÷][^()]*)\)\W*$)"
    r"|,?\s+(?=(?:because|since|who|which|where|when|as (?:this|it|the|we)|so that (?:it|the|we)|if"
    r"|attained|and (?:the|this|that|we|so))\b)"
    r"|,\s+(?=(?:so|as|not|namely|the|and not|but|with|while|after|for)\b)",
    re.IGNORECASE,
)
"""Where the next clause, or a remark, begins."""
SUBORDINATE: Final = re.compile(
    r"[(—–]|(?:because|since|who|which|where|when|as|so that (?:it|the|we)|if|after|attained|for|not|and not|namely"
    r"|with|while|by)\b",
    re.IGNORECASE,
)
"""What a clause begins with that only says why, when or of what the main one is true."""
RESTATED: Final = re.compile(
    r",?\s+\(?(?:i\.\s?e\.|that is,|or,? equivalently,?|equivalently,|in other words,)\s*,?\s*", re.IGNORECASE
)
"""What stands between an answer and the same in another form."""


def main_clause(sentence: str) -> str:
    """Return the last clause with a verb and a value that is not subordinate, or else what the sentence begins with."""
    if SUBORDINATE.match(sentence):
        sentence = sentence.partition(", ")[2] or sentence
    first, *rest = BREAK.split(sentence)
    main = [part for part in rest if not SUBORDINATE.match(part) and VERB.search(part) and has_value(part)]
    if main:
        return main[-1]
    is_interrupted = not VERB.search(first) and VERB.search("".join(rest))  # "The number of those who passed is 3"
    return sentence if is_interrupted else first


def behind_verb(clause: str) -> list[str]:
    """Return what follows the last verb in words, and what follows the last verb or sign."""
    verbs = list(VERB.finditer(clause))
    in_words = [verb for verb in verbs if verb[0].isalpha()]
    return [clause[verb.end() :] for verb in (*in_words[-1:], *verbs[-1:])]
