r"""Calls of functions of several numbers, and counts of choices, in one notation.

- ``\gcd(12, 18)``, ``\mathrm{lcm}[4, 6]`` and ``\max\{3, 5\}`` become ``\gcd(12; 18)`` and so on: their commas are not
  those of thousands, and their brackets make no set.
- ``17 mod 5`` becomes ``17 \bmod 5``.
- ``{}_{10}C_3``, ``{}^{10}C_3``, ``nCr(10, 3)`` and ``10 choose 3`` become ``\binom{10}{3}``, and those with P
  ``\permutations(10; 3)``.
"""

from __future__ import annotations

import re
from typing import Final

from rlplug_rewards.answers.splitting import CLOSES, OPENS, split

NAMES: Final = {"hcf": "gcd", "gcf": "gcd", "lcd": "lcm", "arctg": "arctan", "arcctg": "arccot", "tg": "tan"} | {
    "ctg": "cot",
    "sign": "sgn",
    "ceiling": "ceil",
    "arsinh": "arcsinh",
    "arcosh": "arccosh",
    "artanh": "arctanh",
}
"""Other names of functions."""
LETTER: Final = r"\s*(?:«\s*([CP])\s*»|\{\s*([CP])\s*\}|([CP]))\s*"
INDEX: Final = r"\s*(?:\{([^{}]{1,12})\}|(\w))"
SCRIPTS: Final = re.compile(rf"(\{{\s*\}})?\s*[_^]{INDEX}{LETTER}_{INDEX}")
"""A count whose first number stands before its letter, as ``{}_{10}C_3``."""
BEFORE: Final = (*"=+-*/([{⦃,;:<>", r"\cdot", r"\times")
"""What stands before it, where no empty braces do: nothing whose power or subscript its first number may be."""
CHOOSE: Final = re.compile(r"(?<![\w.^])(\d{1,4}|[mnN])\s*(?:«\s*choose\s*»|\bchoose\b)\s*(\d{1,4}|[kr])(?![\w.^])")
CALL: Final = re.compile(r"(\\)?(?<![A-Za-z])(?:(gcd|lcm|max|min|hcf|gcf|lcd)|(nCr|nPr))\s*(?=[(\[{⦃])", re.IGNORECASE)
MODULO: Final = re.compile(r"([\w)}\]])\s*(?:«\s*mod(?:ulo)?\s*»|\bmod(?:ulo)?\b)\s*(?=\{?\d)")
PLAIN: Final = re.compile(r"(?<![A-Za-z\\])(floor|ceil|ceiling|sgn|sign|coth|Re|Im)\s*(?=\()")
MOST_CALLS: Final = 100
PAIRS: Final = {"(": ")", "[": "]", "{": "}", "⦃": "⦄"}


def in_one_notation(text: str) -> str:
    """Return a text in which calls and counts have one notation each."""
    text = SCRIPTS.sub(_count, text)
    text = CHOOSE.sub(r"\\binom{\1}{\2}", text)
    text = MODULO.sub(r"\1\\bmod ", text)
    text = PLAIN.sub(lambda match: f"\\{NAMES.get(match[1], match[1])} ", text)
    at = 0
    for _ in range(MOST_CALLS):
        if (match := CALL.search(text, at)) is None:
            break
        end = _end(text, match.end())
        arguments = [] if end is None else split(text[match.end() + 1 : end], ",;")
        at = match.end()
        if end is None or (match[3] and len(arguments) != 2) or (len(arguments) < 2 and not match[1]):
            continue  # 5 min (about)
        name = match[2] and NAMES.get(match[2].lower(), match[2].lower())
        called = f"\\{name}({';'.join(arguments)})" if name else count(match[3][1], *arguments)
        text = text[: match.start()] + called + text[end + 1 :]
        at = match.start() + len(name or "")
    return text


def count(letter: str, above: str, below: str) -> str:
    """Return the number of choices (C) or ordered choices (P, A) of ``below`` from ``above``."""
    return rf"\binom{{{above}}}{{{below}}}" if letter.upper() == "C" else rf"\permutations({above};{below})"


def _count(match: re.Match[str]) -> str:
    _, above, one_above, *letters, below, one_below = match.groups()
    before = match.string[max(0, match.start() - 8) : match.start()].rstrip()
    if match[1] is None and before and not before.endswith(BEFORE):
        return match[0]
    return count(next(filter(None, letters)), above or one_above, below or one_below)


def _end(text: str, begin: int) -> int | None:
    """Return where the bracket that opens at ``begin`` closes."""
    depth = 0
    for at in range(begin, len(text)):
        depth += (text[at] in OPENS) - (text[at] in CLOSES)
        if depth == 0:
            return at if text[at] == PAIRS[text[begin]] else None
    return None
