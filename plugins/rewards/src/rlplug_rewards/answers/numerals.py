r"""Numerals: thousands, mixed numbers, repeating decimals, scientific notation, other bases, and number words.

``join`` rewrites those in a text that :func:`~rlplug_rewards.answers.notation.clean` returned:

- Thousands are groups of three digits: ``1,234``, ``10\,000``, ``10 000``, ``1,00,000``. ``1, 234`` is two numbers.
- A mixed number is a whole number before a proper fraction: ``1 1/2`` and ``1\frac{1}{2}`` are 3/2; ``2\frac{5}{3}``
  is a product.
- Repeating decimals: ``0.\overline{3}``, ``0.(3)``, ``0.333...``.
- Scientific notation: ``3e8``, ``3 \times 10^8``, ``3 x 10^8``.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from rlplug_rewards.answers.notation import THIN

GROUPS: Final = re.compile(
    rf"(?<![\d.,_^])(?<!\^\{{)\d{{1,3}}(?:,\s?{THIN}?\d{{3}})+(?![\d,])|(?<![\d.,_^])\d{{1,2}}(?:,\d{{2}})+,\d{{3}}(?![\d,])"
)
SPACED: Final = re.compile(
    rf"(?<![\d.,_^{{])(?<!\d )[1-9]\d{{0,2}}(?:[{THIN}_']\d{{3}}| (?=\d{{3}})\d{{3}})+(?![\d/]|\s\d)"
)
EUROPEAN: Final = re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3})+,\d+(?!\d)|(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.])")
REPEATED: Final = re.compile(
    r"(?<!\d)(\d*)\.(\d*)(?:\\(?:overline|bar|dot|overset\{\\cdot\})\s*\{?(\d+)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?|\((\d+)\))(?:\s*\.\.\.)?"
)
ENDLESS: Final = re.compile(r"(?<!\d)(\d*)\.(\d+)\s*\.\.\.")
MIXED: Final = re.compile(
    r"(?<![\d.^_/A-Za-z}\)])(?<!\^\{)(\d+)(?: *\\frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))|(?: +"
    r"| ?- ?(?=\d+/))(\d+)\s*/\s*(\d+))(?![\d.^])"
)
POWER_OF_TEN: Final = re.compile(r"(?<=[\d.])\s*[xX]\s*(?=10\s*(?:\^|\*\*))")
EXPONENT: Final = re.compile(r"(?<![\w.])(\d++\.?+\d*+|\.\d++)[eE]([+-]?\d{1,4})(?![\w.])")
BASE: Final = re.compile(
    r"\(?\s*(-?[0-9A-Za-z.]+)\s*\)?\s*(?:_\s*\{?\s*(?:«\s*)?(?:base\s*)?(\w+)\s*»?\s*\}?|(?:\(|«\s*\(?"
    r"|,)?\s*(?:in )?base[ -]+(\w+)\s*\)?»?)"
)
BASES: Final = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "sixteen": 16,
}
BASES_OF_NAMES: Final = BASES | {"eleven": 11, "twelve": 12, "binary": 2, "octal": 8, "hex": 16}
UNITS: Final = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS: Final = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
WORDS: Final = {word: number for number, word in enumerate(UNITS)} | {
    word: 10 * number for number, word in enumerate(TENS, 2)
}
SCALES: Final = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
PARTS: Final = {
    "half": 2,
    "halves": 2,
    "third": 3,
    "quarter": 4,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
}
NUMBER_WORDS: Final = "|".join((*WORDS, *SCALES))


def join(text: str, groups: bool = True) -> str:
    """Return a text in which each numeral is one number or a sum in parentheses.

    Args:
        groups: Whether commas may be those of thousands; in brackets they separate.
    """
    text = EUROPEAN.sub(lambda match: match[0].replace(".", "").replace(",", "."), text)
    if groups:
        text = GROUPS.sub(_grouped, text)
    text = SPACED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = text.replace(THIN, " ")
    text = REPEATED.sub(_repeating, text)
    text = ENDLESS.sub(_endless, text)
    text = MIXED.sub(_mixed, re.sub(r"(?<![\d.])(\d+) and (?:a|one) half\b", r"(\1+1/2)", text))
    text = POWER_OF_TEN.sub("*", text)
    text = EXPONENT.sub(lambda match: f"({match[1]}*10^{{{int(match[2])}}})", text)
    return re.sub(r"(?<=\d)\s+[xX]\s+(?=\d)", "*", text)


def _grouped(match: re.Match[str]) -> str:
    if match[0].startswith("0") or re.search(r",\s", match[0].replace(THIN, "")):
        return match[0]
    return re.sub(r"\D", "", match[0])


def _mixed(match: re.Match[str]) -> str:
    above = match[2] or match[3] or match[6]
    below = match[4] or match[5] or match[7]
    if int(above) >= int(below) or int(match[1]) == 0:
        return match[0]
    return f"({match[1]}+{above}/{below})"


def _repeating(match: re.Match[str]) -> str:
    period = match[6] or (match[3] + match[4] + match[5] if match[5] else match[3])
    return _exact(match[1], match[2], period)


def _endless(match: re.Match[str]) -> str:
    """Return the fraction of a decimal whose last digits repeat, or the decimal."""
    digits = match[2]
    for length in range(1, len(digits) // 2 + 1):
        period = digits[-length:]
        count = 0
        while digits[: len(digits) - count * length].endswith(period):
            count += 1
        if count >= (3 if length == 1 else 2) or (
            length == 1 and count == 2 and len(digits) <= 3 and count == len(digits)
        ):
            return _exact(match[1], digits[: len(digits) - count * length], period)
    return f"{match[1]}.{digits}"


def _exact(whole: str, fixed: str, period: str) -> str:
    scale = 10 ** len(fixed)
    value = (
        Fraction(int(whole or 0))
        + Fraction(int(fixed or 0), scale)
        + Fraction(int(period), scale * (10 ** len(period) - 1))
    )
    return f"({value.numerator}/{value.denominator})"


def in_base(text: str) -> Fraction | None:
    """Return the value of a numeral that names its base, such as ``101_2``, ``1A_{16}``, ``0b101``, ``101 (base 2)``.

    Letters alone are a numeral in base 16 only: ``A_2`` is a symbol.
    """
    if re.fullmatch(r"-?0[bB][01]+|-?0[xX][0-9a-fA-F]+|-?0[oO][0-7]+", text):
        return Fraction(int(text, 0))
    match = BASE.fullmatch(text)
    if match is None or (
        not any(each.isdigit() for each in match[1]) and not (match[1].isupper() and match[1].isalpha())
    ):
        return None
    name = (match[2] or match[3]).lower()
    base = BASES_OF_NAMES.get(name) or (int(name) if name.isdigit() and len(name) < 3 else 0)
    if not 2 <= base <= 36 or (match[1].isalpha() and base != 16):
        return None
    whole, _, part = match[1].partition(".")
    try:
        value = Fraction(int(whole + part, base), base ** len(part))
    except ValueError:
        return None
    return value


def in_words(text: str) -> Fraction | None:
    """Return the value of a number in words, such as ``twenty-one``, ``2.5 million``, ``three quarters``."""
    if (mixed := re.fullmatch(r"(.+?)\s+and\s+(?:a|one)\s+(\w+)", text.strip().lower())) is not None and mixed[
        2
    ] in PARTS:
        whole = in_words(mixed[1]) if not mixed[1].isdigit() else Fraction(mixed[1])
        return None if whole is None else whole + Fraction(1, PARTS[mixed[2]])
    words = [word for word in re.split(r"[\s-]+", text.lower().replace(" and ", " ")) if word]
    if not words or len(words) > 9:
        return None
    if len(words) == 2 and (parts := PARTS.get(words[1].removesuffix("s") if words[1] != "halves" else "halves")):
        above = WORDS.get(words[0], 1 if words[0] in ("a", "an") else None)
        return None if above is None else Fraction(above, parts)
    total, current, is_empty = Fraction(0), Fraction(0), True
    for number, word in enumerate(words):
        if word in WORDS:
            current += WORDS[word]
        elif word in SCALES and (not is_empty or number == 0):
            current = (current if not is_empty else Fraction(1)) * SCALES[word]
            if SCALES[word] >= 1000:
                total, current = total + current, Fraction(0)
        elif number == 0 and re.fullmatch(r"-?\d+(?:\.\d+)?", word) and len(words) > 1:
            current = Fraction(word)
        elif number == 0 and word in ("a", "an") and len(words) > 1:
            current = Fraction(1)
        else:
            return None
        is_empty = False
    return total + current
