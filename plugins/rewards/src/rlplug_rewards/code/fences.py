"""Code blocks of a text in Markdown, by a walk over its lines as CommonMark describes them (spec 0.31, section 4.5)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

OPENING: Final = re.compile(
    r"(?P<indent>[ \t]*(?:(?:[-*+>]|\d{1,3}[.)])[ \t]+)*)(?P<mark>`{3,}|~{3,})[ \t]*(?P<info>[^`]*)$"
)
BEHIND_TEXT: Final = re.compile(r"(?P<indent>)\S.*?(?<!`)(?P<mark>`{3})[ \t]*(?P<info>[A-Za-z]\w*)[ \t]*$")
PYTHON: Final = frozenset(
    {
        "",
        "python",
        "py",
        "python3",
        "py3",
        "python2",
        "ipython",
        "pycon",
        "cpython",
        "python3.10",
        "python3.11",
        "python3.12",
    }
)


@dataclass(frozen=True)
class Block:
    """A closed block: its language in lower case, empty without one, and its lines."""

    language: str
    code: str


def blocks(text: str) -> Iterator[Block]:
    """Yield the closed code blocks of a text in order.

    A fence may stand in a list item or a quotation, behind text on its line when it names a language, and be longer
    than three marks; the fence that closes it has at least as many of the same marks, and no language.
    """
    mark = indent = language = ""
    inner: list[str] = []
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if not mark:
            opened = OPENING.match(line) or (BEHIND_TEXT.match(line) if len(line) < 1000 else None)
            if opened is not None:
                mark, indent, language, inner = opened["mark"], opened["indent"], _language(opened["info"]), []
        elif _closes(line, mark):
            yield Block(language, "".join(f"{each}\n" for each in inner))
            mark = ""
        else:
            inner.append(_without_indent(line, indent))


def _language(info: str) -> str:
    words = re.split(r"[\s,{}:=]+", info.strip(" \t{}.").lower())
    return words[0].lstrip(".") if words else ""


def _closes(line: str, mark: str) -> bool:
    rest = line.strip().lstrip("> \t")
    length = len(rest) - len(rest.lstrip(mark[0]))
    return length >= len(mark) and (not rest[length:].strip() or rest[length:].lstrip().startswith("<"))


def _without_indent(line: str, indent: str) -> str:
    """Return a line without the white space in front that its fence has too, and without a quotation's mark."""
    if ">" in indent:
        line = re.sub(r"^[ \t]*>[ ]?", "", line)
    width = len(indent.replace(">", "").expandtabs(4)) if ">" not in indent else 0
    removed = 0
    while removed < width and line[:1] in (" ", "\t"):
        removed += 4 if line[0] == "\t" else 1
        line = line[1:]
    return line
