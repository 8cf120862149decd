"""Tokens of algebraic expressions: numbers, commands, names of functions, and symbols of one letter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import mpmath

from rlplug_rewards.answers.notation import GREEK_NAMES

MOST_TOKENS: Final = 2000
FUNCTIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    **{
        name: getattr(mpmath, name)
        for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "sech", "csch", "exp")
    },
    **{f"arc{name}": getattr(mpmath, f"a{name}") for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    **{f"arc{name}": getattr(mpmath, f"a{name}") for name in ("sinh", "cosh", "tanh")},
    **{f"a{name}": getattr(mpmath, f"a{name}") for name in ("sin", "cos", "tan")},
    "cis": mpmath.expj,
    "ln": mpmath.log,
    "log": mpmath.log,
    "lg": mpmath.log10,
}
"""Functions of one number, by the name that may also stand without a backslash."""
COMMANDS: Final[Mapping[str, Callable[[Any], Any]]] = {"Re": mpmath.re, "Im": mpmath.im, "sgn": mpmath.sign}
"""Functions of one number whose names are words or products without a backslash."""
GREEK: Final = frozenset((*GREEK_NAMES, *["Gamma", "Delta", "Theta", "Lambda", "Xi", "Sigma", "Phi", "Psi", "Omega"]))
WORDS: Final = sorted(
    [*FUNCTIONS, "sqrt", "cbrt", "pi", "infinity", "infty", "abs", "floor", "ceil", "binom", "theta", "alpha", "beta"],
    key=len,
    reverse=True,
)
BEGIN: Final = frozenset((
    *GREEK, *FUNCTIONS, *COMMANDS, "frac", "sqrt", "cbrt", "pi", "binom", "infty", "lfloor", "lceil", "abs", "floor",
    "ceil", "gcd", "lcm", "max", "min", "permutations", "sum", "prod", "overline",
))  # fmt: skip
"""Commands with which a factor begins."""
TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>\d+\.?\d*|\.\d+)|\\(?P<command>[A-Za-z]+)|(?P<word>[A-Za-z]+)|(?P<symbol>\*\*|.))", re.DOTALL
)


class Unreadable(ValueError):
    """The text is no expression."""


def tokens(text: str) -> list[str]:
    """Return the tokens of an expression.

    Raises:
        Unreadable: There are more than ``MOST_TOKENS``.
    """
    found: list[str] = []
    for match in TOKEN.finditer(text.strip()):
        if match["command"]:
            found.append("\\" + match["command"])
        elif match["word"]:
            found += _words(match["word"])
        else:
            found.append(match["number"] or match["symbol"])
        if len(found) > MOST_TOKENS:
            raise Unreadable("it is too long")
    return found


def is_number(token: str) -> bool:
    return token[0].isdigit() or (token[0] == "." and len(token) > 1)


def _words(word: str) -> list[str]:
    """Split letters into names of functions and symbols of one letter."""
    parts: list[str] = []
    while word:
        known = next(
            (name for name in WORDS if word.lower().startswith(name) and word.startswith((name, name.capitalize()))),
            None,
        )
        parts.append(known or word[0])
        word = word[len(parts[-1]) :]
    return parts
