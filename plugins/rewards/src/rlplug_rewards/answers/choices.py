"""``read_choice``: the letter of a multiple choice that a text gives."""

from __future__ import annotations

import re
from typing import Final

from rlplug_rewards.answers.doubt import denies, doubts

LEAD: Final = re.compile(
    r"^\s*(?:(?:so|thus|therefore|hence|then|it is|it's|i(?: would|['’]d) say"
    r"|it (?:must|should|has to) be)\b[,:]?\s*)+",
    re.IGNORECASE,
)
LETTERS: Final = "ABCDEFGHIJ"
LETTER: Final = (
    r"(?:\\(?:text|textbf|mathrm|mathbf|boxed)\s*\{\s*)*[*_`\"'$]*\(?\[?\s*(?:\\(?:text|textbf"
    r"|mathrm|mathbf)\s*\{\s*)?\(?(?P<letter>[A-J])\b(?!['’]|-[a-z]|\(\s*-?\d+\s*,)"
)
NAMED: Final = re.compile(
    r"(?:\b(?:answer|choice|option|alternative|selection|letter)s?\b[^.\n:]{0,60}?(?:\bis\b|['’]s\b|\bare\b"
    r"|\bwould be\b|\bmust be\b|\bshould be\b|:|=|：)"
    r"|\b(?:answer|choose|chose|choosing|pick|select|selected|go with|going with|choice"
    r"|option(?!\W{0,6}[A-J]\W{0,3}\s(?!is\b|fits?\b)[a-z]+s\b))\b)\W{0,6}?"
    r"(?:\s*(?:therefore|thus|then|clearly|simply|indeed|option|choice|letter|answer|the|is|likely|best|correct)\b\W{0,4}?)*\s*"
    + LETTER,
    re.IGNORECASE,
)
CHINESE: Final = re.compile(
    r"(?<![不未没])(?:故选|应选|选择?|答案选?(?:是|为)?)\s*[:：]?\s*(?P<letter>[A-J])(?![A-Za-z])"
)
SUBJECT: Final = re.compile(
    r"(?:^|[.!?,\n]\s*|\b(?:so|thus|therefore|hence|only)\b,?\s*)(?:option|choice|answer|statement)?\s*[*_$(\[]*(?P<letter>[A-J])[*_$)\]]*\s+is\s+(?:the\s+)?(?:correct|right|best|true|answer|only)",
    re.IGNORECASE,
)
ONLY: Final = re.compile(r"\b[Oo]nly\s+(?:option\s+|choice\s+|statement\s+)?[*_(]*(?P<letter>[A-J])[*_)]*\s+[a-z]+s\b")
AT_END: Final = re.compile(r"\b(?:is|be|was)\s+(?:option\s+|choice\s+)?[*_(]*(?P<letter>[A-J])[*_).]*\s*\Z")
ALONE: Final = re.compile(r"\W*" + LETTER + r"[\s)\].*_`\"'$}:,]*\Z")
FIRST: Final = re.compile(r"\s*[*_`$(\[]*(?P<letter>[A-J])(?:\s*[)\].:]|[*_]{1,2}|\s[-–—](?=\s))[)*_`}\]$]*(?:\s|$)")
LABEL: Final = re.compile(r"\b[A-J][).:]")
DENIED_BEHIND: Final = re.compile(
    r"[)*_\]]*\s*(?:\?|if\b|unless\b|(?:is|was) (?:about|for|from|used|what|where|how)\b)"
    r"|[^\w\n.]*(?:is|was|would be|seems|looks|can)?\W*(?:not\b(?!\W{0,6}[A-J]\b)|n['’]t\b|incorrect|wrong|false|too\b"
    r"|excluded|out\b)",
    re.IGNORECASE,
)
SEVERAL: Final = re.compile(
    r"(?<![A-Za-z'’])[*_(\[]*([A-J])[)*_\]]*\s*(?:,|/|&|and|or)\s*(?:\band\b|\bor\b)?\s*[*_(\[]*([A-J])(?![A-Za-z'’])"
)


RUN: Final = re.compile(
    r"(?<![A-Za-z'’])[*_(\[]*[A-J][)*_\]]*(?:\s*(?:,|;|/|&|\band\b)(?:\s*and\b)?\s*[*_(\[]*[A-J][)*_\]]*)+(?![A-Za-z'’])"
)
TOGETHER: Final = re.compile(r"(?<![A-Za-z])[A-J]{2,6}(?![A-Za-z])")


COMMANDS: Final = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textit|mbox|boxed|rm)\s*\{([^{}]*)\}")


def read_choices(text: str) -> frozenset[str]:
    """Return the letters of a text that gives several, such as ``A, C``, ``ACD`` or ``options A and C are correct``."""
    text = COMMANDS.sub(r"\1", text)
    runs = RUN.findall(text) or [run for run in TOGETHER.findall(text.strip()) if list(run) == sorted(set(run))]
    return frozenset(re.findall(r"[A-J]", runs[-1])) if runs and not denies(text) else frozenset()


def read_choice(text: str, is_marked: bool = False, letters: str = LETTERS) -> str | None:
    """Return the letter that a text gives, or ``None`` where it gives none or several.

    Args:
        text: Such as ``The answer is D.``, ``(C)`` or ``B) 12``.
        is_marked: Whether all of it is the answer, as in a box.
        letters: Letters of the choices.
    """
    text = COMMANDS.sub(r"\1", text)
    text = text.replace("\\", " ").strip()
    letter = _marked(text) if is_marked else _in_prose(text)
    return letter if letter is not None and letter in letters else None


def _marked(text: str) -> str | None:
    if SEVERAL.search(text) and len(text) < 40 and not FIRST.match(text):
        return None
    match = ALONE.fullmatch(text) or FIRST.match(text)
    if match is not None:
        rest = text[match.end() :]
        return None if re.match(r"\s*(?:and|or|,|/|&|-)\s*[*(]*[A-J]\b(?![a-z'])", rest) else match["letter"].upper()
    match = re.match(
        r"\W*(?:the\s+)?(?:correct\s+|final\s+|best\s+)?(?:answer|option|choice)\b\W*(?:is\b\W*)?(?:option|choice)?\s*"
        + LETTER,
        text,
        re.IGNORECASE,
    )
    if match is not None and match["letter"].isupper() and not _has_other(text, match.end()):
        return match["letter"]
    return _last_of(NAMED, text)


def _in_prose(text: str) -> str | None:
    text = LEAD.sub("", text, count=1) if len(text) < 200 else text
    if len(text) < 200 and "\n" not in text.strip() and (ALONE.fullmatch(text) or FIRST.match(text)):
        return _marked(text)
    named = _last_of(NAMED, text)
    if named is not None or NAMED.search(text):
        return named
    subject = next(filter(None, (_last_of(each, text) for each in (CHINESE, SUBJECT, ONLY, AT_END))), None)
    if subject is not None:
        return subject
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    labelled = [line for line in lines if LABEL.search(line)]
    if len(lines) > 1 and ALONE.fullmatch(lines[0]) and not any(map(ALONE.fullmatch, lines[1:])) and not labelled:
        return _marked(lines[0])
    if len(lines) > 1 and labelled == lines[:1]:  # a choice, and below it why
        return _marked(lines[0]) if len(LABEL.findall(lines[0])) == 1 else None
    if not lines or sum(FIRST.match(line) is not None for line in lines) > 1:  # the choices, once more
        return None
    return _marked(lines[-1]) if ALONE.fullmatch(lines[-1]) or FIRST.match(lines[-1]) else None


def _last_of(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the letter of the last sentence that gives one and does not deny it."""
    found: str | None = None
    for match in pattern.finditer(text):
        letter = match["letter"]
        if not letter.isupper():
            continue
        begin = max(text.rfind(mark, 0, match.start("letter")) for mark in (". ", "\n", "! ", "? ", ", ", "; "))
        sentence = text[begin + 1 : match.start("letter")]
        if doubts(sentence) or DENIED_BEHIND.match(text[match.end("letter") :]):
            continue
        if (
            letter in "AI"
            and re.match(r"\s+[a-z]", text[match.end("letter") :])
            and not re.match(r"\s+(?:because|since|as|is|for|and|with|which)\b", text[match.end("letter") :])
        ):
            continue  # an article or a pronoun
        found = None if _has_other(text, match.end("letter")) else letter
    return found


def _has_other(text: str, at: int) -> bool:
    """Return whether another letter follows one, as in "A or B"."""
    return (
        re.match(
            r"[)\]*_$.}]*\s*(?:,|/|&|\band\b|\bor\b)\s*(?:\band\b|\bor\b)?\s*(?:also\s+|maybe\s+|option\s+)?[*_(\[$]*[A-J](?![A-Za-z'’])",
            text[at:],
        )
        is not None
    )
