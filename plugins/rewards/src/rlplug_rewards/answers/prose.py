"""The part of unmarked prose that is its answer: the last sentence that says what the answer is, else the last one.

The answer of a sentence is the first of these that has a meaning:

1. what it says again in another form ("that is, ...");
2. all of its main clause, where that has no verb, or else what follows the last verb of that;
3. the number, with its unit, that such a part begins with;
4. the only value of the main clause.

A sentence that denies, doubts, supposes or asks has no answer, but for its last clause. What follows words of
correction, such as "wait", counts alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from rlplug_rewards.answers.clauses import BREAK, CONSEQUENCE, LEAD, RESTATED, VERB, behind_verb, main_clause
from rlplug_rewards.answers.doubt import doubts, is_conditional, is_supposed, last_clause
from rlplug_rewards.answers.phrases import BOUND, has_value, names, only_value, phrases
from rlplug_rewards.answers.sentences import after_correction, first_sentence, last_sentence, plain, shortened

HEADING: Final = r"(?:[*_]*(?:step|part|case)\b|[*_]*\d[.)] [a-z][^\n]*\n\s*\S|[^\d\n]*[a-z]{4}[^\d\n]*\n\s*\S)"
"""What makes ``####`` a heading of a step, and no mark of an answer."""
CUE: Final = re.compile(
    r"(?:\b(?:answer|choice|option|result|solution(?!\W{0,4}\n))s?\b"
    r"(?:\s+(?:to|of|for)\b[^.\n:=$]{0,80}?)?"
    r"\W{0,4}?\s*(?:\bis\b|['’]s\b|\bare\b|\bwould be\b|\bshould be\b|\bmust be\b|\bequals\b|:|=|：|\n)"
    rf"|^\s*#{{4}}(?!#|\s*{HEADING})|^\s*(?:A|Ans|Sol)\s*[:.](?=\s)"
    r"|答案\s*(?:是|为|：|:|=)|答え\s*(?:は|：|:)|Ответ\s*:)",
    re.IGNORECASE | re.MULTILINE,
)
"""Words and marks that an answer follows."""
OBJECT: Final = re.compile(r"\{\s*\"\w+\"\s*:.*\}", re.DOTALL)
FIELD: Final = re.compile(
    r"\"(?:final[_ ]?)?(?:answer|result|solution|value|output|choice|ans)\"\s*:\s*(\"[^\"]*\"|\[[^\]]*\]|[^,}\n]+)",
    re.IGNORECASE,
)
"""The field of an object in JSON that is its answer."""
YES_OR_NO: Final = re.compile(
    r"(yes|no|true|false)\b(?:[,.!:]|\s+[-–—])(?!\s*(?:wait|that|actually|sorry|I )\b)[^?\n]{0,200}", re.IGNORECASE
)
"""An answer of one sentence, or a few, that begins with yes or no."""
EMPHASIS: Final = re.compile(r"\*\*(?!\s)(?:[A-Za-z ]+:\s+)?([^*\n]+?)(?<![\s:])\*\*")
NONE: Final = re.compile(
    r"\b(?:(?:does not|doesn['’]t|do not|don['’]t|did not) exist"
    r"|no (?:real |integer |such )?(?:solutions?|values?|roots?)(?: of \S+)?(?: exists?| that satisf[^.]*)?"
    r"|(?:un|not )defined)\W*$",
    re.IGNORECASE,
)
"""What a sentence ends with that says that there is nothing, in words that would deny any other answer."""


def candidates(text: str, is_marked: bool = False) -> Iterator[str]:
    """Yield texts that may be the answer, the likeliest first: the first that has a meaning is the answer.

    Args:
        text: Prose.
        is_marked: Whether a tag or a box holds it: then only a sentence that says what the answer is has one.
    """
    text = shortened(text)
    if OBJECT.fullmatch(text.strip()) is not None:
        yield from (field.strip(' "') for field in FIELD.findall(text)[-1:])
        return
    emphasised = EMPHASIS.findall(last_sentence(text.strip()))
    text = plain(text)
    if not is_marked:
        yield from _yes_or_no(text)
    text = after_correction(re.sub(r"\s*\n\s*\n\s*", "\n\n", re.sub(r"[ \t]+", " ", text))).strip()
    cue = _last_cue(text)
    sentence = "" if cue is None else first_sentence(text[cue.end() :])
    if sentence.strip(" *_:$"):
        if not doubts(sentence):
            yield from _yes_or_no(sentence)
            yield from (part for part in emphasised if len(emphasised) == 1 and part in sentence)
            yield from _of_statement(sentence)
    elif is_marked:
        if "=" not in text and not BOUND.search(text) and not doubts(text):
            yield from _behind_verb(text)
    elif text:
        yield from _of_end(text, emphasised)


def _yes_or_no(text: str) -> Iterator[str]:
    if (answer := YES_OR_NO.fullmatch(text.strip())) is not None:
        yield answer[1]


def _last_cue(text: str) -> re.Match[str] | None:
    """Return the last words that say that an answer follows, which nobody only supposes."""
    cue: re.Match[str] | None = None
    for match in CUE.finditer(text):
        begin, rest = text[: match.end()], text[match.end() :].strip()
        is_one_of_two = is_conditional(begin) and first_sentence(rest).strip() != rest
        if not is_one_of_two and not is_supposed(begin):
            cue = match
    return cue


def _of_statement(sentence: str) -> Iterator[str]:
    """Yield what the words behind a cue may give."""
    statement, *again = RESTATED.split(sentence)
    yield from again[-1:]
    yield from phrases(BREAK.split(statement)[0])
    yield from phrases(statement)
    yield from _behind_verb(statement)


def _of_end(text: str, emphasised: list[str]) -> Iterator[str]:
    """Yield what the last sentence may give, where no words say that an answer follows."""
    sentence = _conclusion(last_sentence(text))
    if (none := NONE.search(sentence)) is not None and not doubts(sentence[: none.start()]):
        yield "no solution" if none[0].lower().startswith("no ") else none[0]
    last = last_clause(sentence.rstrip(" .!"))
    if doubts(sentence) or has_value(last):
        sentence = LEAD.sub("", last.strip())
    if doubts(sentence):
        return
    if len(emphasised) == 1:
        yield emphasised[0]
    clause, *again = RESTATED.split(main_clause(sentence))
    yield from again[-1:]
    yield from [clause] if VERB.search(clause) else phrases(clause)
    yield from _behind_verb(clause)
    yield from only_value(clause)
    yield from names(sentence)


def _conclusion(sentence: str) -> str:
    """Return the part of a sentence that follows from the others, without the words that lead to it."""
    *before, last = CONSEQUENCE.split(sentence)
    says_nothing = not (has_value(last) or NONE.search(last) or doubts(last))
    return LEAD.sub("", before[-1] if before and says_nothing and has_value(before[-1]) else last)


def _behind_verb(clause: str) -> Iterator[str]:
    for part in behind_verb(clause):
        yield from phrases(part)
