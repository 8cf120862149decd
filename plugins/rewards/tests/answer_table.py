"""The table of answers: references, completions and their truth by hand, of the kinds that data sets and "
"models write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("answer_table.txt")


class Pair(NamedTuple):
    """A completion with the answers that are accepted, whether it gives one, and whether a rule reads it."""

    kind: str
    references: tuple[str, ...]
    completion: str
    is_right: bool
    is_read: bool = True


def pairs() -> Iterator[Pair]:
    """Yield all pairs of the table."""
    kind, references = "", ()
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        mark, _, text = line.replace("⏎", "\n").partition(" ")
        if mark == "##":
            kind = text
        elif mark == "=":
            references = tuple(text.split(" || "))
        elif mark in ("+>", "->"):
            yield Pair(kind, references, text, mark == "+>")
        elif mark == "?>":
            yield Pair(kind, references, text, True, False)
        elif mark in ("+", "-"):
            yield Pair(kind, references, f"So it is $\\boxed{{{text}}}$.", mark == "+")
