"""Brackets of answers: whether they match, what they hold, and splitting outside of them."""

from __future__ import annotations

from typing import Final

OPENS: Final = "([{⦃"
CLOSES: Final = ")]}⦄"


def balanced(text: str) -> bool:
    """Return whether brackets open as often as they close, and braces match; ``[0, 1)`` does."""
    depth = braces = 0
    for character in text:
        if character in OPENS:
            depth += 1
        elif character in CLOSES:
            depth -= 1
        braces += (character == "{") - (character == "}")
        if braces < 0 or (depth < 0 and not text.startswith("]")):
            return False
    return braces == 0 and (depth == 0 or (text.startswith("]") and text.endswith("[")))


def inside(text: str, opens: str, closes: str) -> str | None:
    """Return what stands in one pair of brackets around all of a text, or ``None`` where there is none."""
    if not (text.startswith(opens) and text.endswith(closes) and len(text) > len(opens)):
        return None
    depth = 0
    inner = text[len(opens) : len(text) - len(closes)]
    for character in inner:
        depth += (character in OPENS) - (character in CLOSES)
        if depth < 0:
            return None
    return inner if depth == 0 else None


def split(text: str, separators: str) -> list[str]:
    """Split at characters outside of brackets."""
    parts, depth, begin = [], 0, 0
    for at, character in enumerate(text):
        depth += (character in OPENS) - (character in CLOSES)
        if depth == 0 and character in separators:
            parts.append(text[begin:at])
            begin = at + 1
    return [*parts, text[begin:]]
