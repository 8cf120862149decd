"""Sentences of a reply: without what is no prose, and without what it takes back itself."""

from __future__ import annotations

import re
from typing import Final

CONTRAST: Final = re.compile(
    r"\bnot\s+\\?\$?-?\d[^,.;\n]{0,30}?,?\s+but\s+(?:rather\s+)?"
    r"|,\s+(?:and\s+)?not\s+\\?\$?-?\d[^,;\n]{0,30}?(?=[.;,](?:\s|$)|\n|$)",
    re.IGNORECASE,
)
"""A number that a sentence denies beside the one that it gives: ``not 16 but 18``, ``18, not 16``."""
REMARK: Final = re.compile(
    r"(?:(?<=[.!?\n*$}\])])|(?<=[.!?] ))[ \t]*(?:please )?(?:let me know|if you(?:['’]d| would| need| have| want)"
    r"|feel free|i hope|hope (?:this|that|it)|good luck|happy to|thank|is there anything|would you like|do you)\b"
    r"[^\n]*\s*\Z",
    re.IGNORECASE,
)
"""What a reply says to its reader at its end."""
NOTE: Final = re.compile(
    r"(?<=\n)\n[*_#> ]*(?:note|remark|explanation|verification|justification|check)\b[*_]*[ ]?:"
    r"(?:(?!\banswer|\bfinal).)*\Z",
    re.IGNORECASE | re.DOTALL,
)
"""A last paragraph that says more of an answer that has been given."""
RULE: Final = re.compile(r"^(?:-{3,}|\*{3,}|_{3,})[ \t]*$", re.MULTILINE)
DISPLAY: Final = re.compile(r"(?<!\\)\\(?:\[(.*?)\\\]|\((.*?)\\\))|\$\$([^$]*)\$\$", re.DOTALL)
"""Mathematics in ``\\[...\\]``, ``\\(...\\)`` or ``$$...$$``."""
PROGRAM: Final = re.compile(
    r"^[ \t]*```[ \t]*(?:python|py|c|cpp|c\+\+|java|javascript|js|bash|sh|sql|r|rust|go|sage|matlab|ruby)\b"
    r".*?(?:^[ \t]*```[ \t]*$|\Z)",
    re.IGNORECASE | re.DOTALL | re.MULTILINE,
)
MARKS: Final = re.compile(
    r"</?(?:b|strong|i|em|u|p|br|code|span|div)(?:\s[^<>]*)?/?>|(?<![\w)])\*\*|\*\*(?![\w(])|~~[^~\n]+~~"
    r"|(?<![\w\\])_(?=\d[\d.,]*_(?!\w))|(?<=\d)_(?!\w|\{)|\\text(?:bf)?\{([^{}]{4,})\}"
)
"""Emphasis, and text in mathematics."""
END_MARKS: Final = re.compile(
    r"(?:\s*\$\\(?:blacksquare|square|qed|Box|checkmark)\$|\s*(?:\\(?:blacksquare|square|qed|Box|checkmark)(?![A-Za-z])"
    r"|[■□▪∎✓✔✅☑\ufe0f\U0001f300-\U0001faff]))+(?=[\s$]*$)"
)
"""What ends a proof or a reply."""
CORRECTION: Final = re.compile(
    r"(?:^|(?<=[.!?,;\n])|(?<=[.!?,;\n] )|(?<=[-—–] ))\s*(?:oh |but |hmm,? |no,? )?"
    r"(?:wait|actually|correction|scratch that|sorry|hold on|let me (?:re|double)|i made (?:a|an) (?:mistake"
    r"|error)|no(?=,)|on second thought)\b",
    re.IGNORECASE,
)
SENTENCE_END: Final = re.compile(r"(?:[.!?](?:[*_\"'”)]{0,3})(?=\s+[A-Z*\\$\"“(]|\s*$)|\n)", re.MULTILINE)
ABBREVIATIONS: Final = ("i.e", " i", "e.g", "approx", " vs", " no", " eq", " fig", "sq", " cf")
CURRENCY: Final = re.compile(r"(?<![\\$])\$(?=\d+(?:\.\d+)?(?:[\s.,]|$))")
LONGEST: Final = 4000
"""Characters at the end of a completion in which unmarked answers are looked for."""


def shortened(text: str) -> str:
    """Return the end of a reply without programs, code fences and remarks, with mathematics in ``$...$``."""
    text = RULE.sub("", PROGRAM.sub("", text[-LONGEST:]))
    text = re.sub(r"^[ \t]*(?:```\w*|~~~)[ \t]*$", "", text, flags=re.MULTILINE)
    return REMARK.sub("", DISPLAY.sub(_in_line, NOTE.sub("", text)))


def _in_line(match: re.Match[str]) -> str:
    """Return mathematics in ``$...$``, and the punctuation at its end behind it."""
    inner = " ".join("".join(filter(None, match.groups())).split())
    shorter = inner.rstrip(" .,")
    return f"${shorter}${inner[len(shorter) :].strip()}"


def plain(text: str) -> str:
    """Return a text without emphasis, marks of an end, and numbers that it denies beside the one that it gives."""
    return CONTRAST.sub("", MARKS.sub(lambda match: match[1] or "", END_MARKS.sub("", text)))


def after_correction(text: str) -> str:
    """Return what follows the last words that take back what stands before them."""
    at = 0
    for match in CORRECTION.finditer(text):
        at = match.end()
    return re.sub(r"^(?:[\s,.:;!—]|-\s)+", "", text[at:]) if text[at:].strip(" .,!") else text[:at]


def first_sentence(text: str) -> str:
    """Return the first sentence, of the first line that has one."""
    text = text.lstrip(" \n\t*_:")
    end = _end_of_sentence(text, 0)
    return text[:end]


def last_sentence(text: str) -> str:
    """Return the last sentence, without marks of a list, a heading or a quotation around it."""
    begin, end = 0, _end_of_sentence(text, 0)
    while end < len(text) and text[end:].strip(" .*_\n"):
        begin = end
        end = _end_of_sentence(text, begin + 1)
    return re.sub(r"^(?:[\s#>*]|-\s)+|[\s#>*-]+$", "", text[begin:end])


def _end_of_sentence(text: str, begin: int) -> int:
    """Return where a sentence ends; a full stop or line end in ``$...$`` ends none."""
    for match in SENTENCE_END.finditer(text, begin):
        before = text[begin : match.start()]
        marks = before.count("$") - before.count("\\$") - len(CURRENCY.findall(before))
        is_outside = marks == 0 or before.count("$") % 2 == 0
        is_short = match[0].startswith(".") and before.lower().endswith(ABBREVIATIONS)
        if is_outside and not is_short and before.strip():
            return match.end()
    return len(text)
