r"""Counts of choices in notations that may mean something else.

``C(10, 3)`` and ``P(5, 2)`` may be points, ``C_{10}^3`` and ``A_5^2`` powers of a symbol, ``10C3`` and ``5P2``
products. They are counts only where the other answer is a number, and everywhere else what they also are: a point is
equal to a point. Their numbers are written out, the larger one where it belongs: ``C_3^{10}`` and ``C(3, 10)`` are no
counts, nor is ``2C_1``, which may be twice a constant.
"""

from __future__ import annotations

import re
from typing import Final

from rlplug_rewards.answers.calls import count
from rlplug_rewards.answers.quantities import read_quantity
from rlplug_rewards.answers.values import Quantity

NUMBER: Final = r"\s*(?:\{\s*(\d{1,4})\s*\}|(\d))"
IN_PARENTHESES: Final = re.compile(
    r"(?<![A-Za-z\\»}])(?:«\s*([CP])\s*»|\{\s*([CP])\s*\}|([CP]))\s*\(\s*(\d{1,4})\s*[,;]\s*(\d{1,4})\s*\)"
)
WITH_SCRIPTS: Final = re.compile(
    r"(?<![A-Za-z\\»])(?:«\s*([ACP])\s*»|\{\s*([ACP])\s*\}|([ACP]))\s*"
    rf"(?:_{NUMBER}\s*\^{NUMBER}|\^{NUMBER}\s*_{NUMBER})(?![\d_^'])"
)
IN_A_ROW: Final = re.compile(
    r"(?<![\w.^}\\])(\d{1,4})\s*(?:«\s*([CP])\s*»|\{\s*([CP])\s*\}|([CP]))\s*(\d{1,4})(?![\w.^])"
)


def read_count(text: str) -> Quantity | None:
    """Return the number that a text is when its notations are counts, or ``None`` where it has none or is no number."""
    try:
        rewritten = IN_PARENTHESES.sub(_in_parentheses, text)
        rewritten = WITH_SCRIPTS.sub(_with_scripts, rewritten)
        rewritten = IN_A_ROW.sub(_in_a_row, rewritten)
    except ValueError:
        return None
    if rewritten == text:
        return None
    quantity = read_quantity(rewritten)
    return quantity if isinstance(quantity, Quantity) and not quantity.expression.names else None


def _in_parentheses(match: re.Match[str]) -> str:
    *letters, above, below = match.groups()
    return _count(letters, above, below)


def _with_scripts(match: re.Match[str]) -> str:
    *letters, a, b, c, d, e, f, g, h = match.groups()
    return _count(letters, a or b or g or h, c or d or e or f)


def _in_a_row(match: re.Match[str]) -> str:
    above, *letters, below = match.groups()
    return _count(letters, above, below)


def _count(letters: list[str | None], above: str, below: str) -> str:
    """Return the count in a notation that means nothing else.

    Raises:
        ValueError: It chooses more than there are.
    """
    if int(below) > int(above):
        raise ValueError(f"{below} of {above} cannot be chosen")
    return count(next(filter(None, letters)), above, below)
