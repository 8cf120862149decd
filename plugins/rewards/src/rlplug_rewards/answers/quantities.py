"""Single values: numbers and expressions with their units, ratios, and times of day."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction
from typing import Final

from rlplug_rewards.answers.arithmetic import modulo, multiply
from rlplug_rewards.answers.expressions import Expression, read_expression
from rlplug_rewards.answers.numerals import in_base, in_words, join
from rlplug_rewards.answers.splitting import split
from rlplug_rewards.answers.tokens import FUNCTIONS, Unreadable
from rlplug_rewards.answers.units import CURRENCIES, KNOWN, Unit, read_unit
from rlplug_rewards.answers.values import Clock, Items, Quantity, Value

TIME: Final = re.compile(
    r"(\d{1,2})(?::([0-5]\d))?(?::([0-5]\d))?\s*(?:(a|p)\.?\s*m\.?|(o'clock))?(?:\s*(?:a|p)\.?m\.?)?", re.IGNORECASE
)
ANGLE: Final = re.compile(r"(\d+)\s*\\deg\s*(\d+)\s*'\s*(?:(\d+)\s*(?:\"|''))?")
PIECE: Final = r"(\d++(?:\.\d++)?)\s*([A-Za-z]++)\.?(?:\s*(?:,|and)\s*|\s+|(?=\d)|$)"
COMPOUND: Final = re.compile(f"(?:{PIECE}){{2,}}")
PERCENT: Final = re.compile(
    r"\s*(?:%|«\s*(?:%|percent|per cent|percentage points?)\s*[^»]*»|\b(?:percent|per cent|pct"
    r"|percentage points?)\b)(?:\s*(?:of|chance|probability|increase|decrease|interest|off|discount|profit"
    r"|loss)\b[\w\s]*)?\s*$",
    re.IGNORECASE,
)
CURRENCY_BEHIND: Final = re.compile(r"^\s*(-?\s*\d[\d.,{}]*)\s*([€£¥₹₩])\s*$")
"""An amount with its currency behind it, as most of Europe writes it."""
UNIT_AT: Final = re.compile(r"(?<=[\d})!\]\s%»$])(?=[A-Za-z«\\¢])")
KNOWN_UNIT_AT: Final = re.compile(
    r"(-?\s*[\d.,/]*\d\.?|.*[)}]|.*\\pi(?=\s+[A-Za-z]{2}))(\s*)([A-Za-z]+(?:[\s/^A-Za-z\d{}*.-]*))"
)
UNIT_FRACTION: Final = re.compile(
    r"(?<=[\d})])\s*\\frac\s*\{\s*(m|[a-z][A-Za-z]+)\s*\}\s*\{\s*((?:[smhL]|[a-z][A-Za-z]+)(?:\s*\^\s*\{?\d\}?)?)\s*\}$"
)
"""A unit such as ``\\frac{km}{h}`` behind a number."""
FUNCTION_NAMES: Final = frozenset(FUNCTIONS) | {
    "sqrt",
    "cbrt",
    "pi",
    "infinity",
    "infty",
    "abs",
    "floor",
    "ceil",
    "binom",
    "theta",
    "alpha",
    "beta",
}
RESIDUE: Final = re.compile(
    r"(.+?)\s*\(?\s*(\\[pb]?mod(?![A-Za-z])|«\s*\(?\s*mod(?:ulo)?\s*»|\bmod(?:ulo)?\b)\s*\{?\s*(\d{1,30})\s*\}?\s*\)?"
)
SHORT_WORD: Final = re.compile(r"(?<!\S)(?:[Tt]he|is|are|was|has|of|for)(?=\s)")
"""Words of a sentence that might be a product."""
TWO_WORDS: Final = re.compile(r"(?<!\S)([A-Za-z]{2,})\s+([A-Za-z]{2,})(?!\S)")
MOST_SPLITS: Final = 12
"""Places at which a number may end and its unit begin."""


def read_time(text: str) -> Value | None:
    plain = text.replace("«", " ").replace("»", " ").strip()
    plain = re.sub(
        r"\s+in the (morning|afternoon|evening)$", lambda part: " am" if part[1] == "morning" else " pm", plain
    )
    match = TIME.fullmatch(re.sub(r"\s+", " ", plain))
    if match is None or not (match[2] or match[4] or match[5]):
        return None
    hour, minute, second = int(match[1]), int(match[2] or 0), int(match[3] or 0)
    half = (match[4] or "").lower()
    if hour > 24 or (half and hour > 12):
        return None
    ratio = None
    if match[2] and not half and not match[5]:
        ratio = read_ratio(text)
    if half:
        hour = hour % 12 + (12 if half == "p" else 0)
    return Clock(
        hour % 24 * 3600 + minute * 60 + second,
        bool(half) or hour > 12 or hour == 0,
        ratio if isinstance(ratio, Items) else None,
    )


def read_numeral(text: str) -> Value | None:
    """Read a numeral of its own: in words, or of another base."""
    plain = text.replace("«", " ").replace("»", " ").strip()
    if (below := re.fullmatch(r"(?:negative|minus)\s+([A-Za-z\s-]+)", plain, re.IGNORECASE)) is not None:
        below_zero = in_words(below[1])
        return None if below_zero is None else Quantity(Expression(lambda _: -below_zero, frozenset(), text))
    value = in_base(plain if "«" in text else text)
    if value is None and re.fullmatch(r"-?[\d.]*[A-Za-z\s-]+", plain):
        value = in_words(plain)
    if value is None and (match := re.fullmatch(r"(-?\d+)\s*(?:\^?\{?«?\s*(?:st|nd|rd|th)\s*»?\}?)", text)):
        return read_quantity(match[1])
    if value is None:
        return None
    return Quantity(Expression(lambda _: value, frozenset(), text))


def read_ratio(text: str) -> Value | None:
    parts = (
        split(text, ":")
        if ":" in text
        else re.split(r"(?<=\d)\s*(?:«\s*(?:to|in|out of)\s*»|\s(?:to|in|out of)\s)\s*(?=\d)", text)
    )
    if not 2 <= len(parts) <= 6:
        return None
    values = [expression_of(join(part)) for part in parts]
    if any(value is None for value in values):
        return None
    return Items(":", tuple(Quantity(value) for value in values if value is not None))


def read_quantity(text: str) -> Value | None:
    text = re.sub(r"(?<=\d)\s*\\Omega\s*$", " ohms", join(text))
    text = UNIT_FRACTION.sub(r" \1/\2", text)
    text = CURRENCY_BEHIND.sub(r"\2\1", text)
    text = re.sub(r"\\deg\s*([CF])\s*$", r"\\deg «\1»", text)
    shorter = PERCENT.sub("", text)
    if shorter != text:
        expression = expression_of(shorter)
        return None if expression is None else Quantity(expression, is_percent=True)
    if (residue := _residue(text)) is not None:
        return residue
    currency = re.match(r"(-?)\s*(?:(?:US|USD|A|C|AU|CA)\s*(?=\$))?([$€£¥₹₩])\s*(-?)", text) or re.match(
        r"(-?)«?\s*(USD|EUR|GBP|Rs\.?|INR|HK\$)\s*»?\s*(-?)(?=\d)", text
    )
    if currency is not None:
        name = CURRENCIES.get(currency[2]) or currency[2].strip(".").lower()
        base, _, factor = KNOWN.get(name, (name, 1, KNOWN["m"][2]))
        rest = re.sub(
            r"\s*(?:«\s*)?(?:USD|EUR|dollars?|in total|total|per (?:«?\w+»?)|(?:a|each) \w+|each|/\s*«?\w+»?)\s*»?\s*$",
            "",
            text[currency.end() :],
            flags=re.IGNORECASE,
        )
        expression = _plain_number(f"{currency[1]}{currency[3]}{rest}") or _in_words(rest)
        return None if expression is None else Quantity(expression, Unit(frozenset({(base, 1)}), factor))
    if (quantity := _with_known_unit(text)) is not None:
        return quantity
    if (expression := expression_of(text)) is not None and not is_word(text):
        return Quantity(*_degrees(text, expression))
    return _with_unit(text)


def _residue(text: str) -> Quantity | None:
    r"""Read a number with its modulus: of ``\bmod`` the remainder, unless a sum leaves two."""
    match = RESIDUE.fullmatch(text)
    expression = None if match is None else expression_of(match[1])
    if match is None or expression is None or not (modulus := int(match[3])):
        return None
    if match[2] == r"\bmod":
        if re.search(r".[+-]", _outside(match[1])):
            return None
        number, plain = expression.compute, Fraction(modulus)
        expression = Expression(lambda point: modulo(number(point), plain), expression.names, text)
    return Quantity(expression, Unit(words=frozenset({f"mod{modulus}"}), modulus=modulus))


def _outside(text: str) -> str:
    """Return a text without what brackets hold."""
    while (shorter := re.sub(r"[\[({][^\[\](){}]*[\])}]", "", text)) != text:
        text = shorter
    return text


def _plain_number(text: str) -> Expression | None:
    expression = expression_of(text)
    return expression if expression is None or not expression.names else None


def _in_words(text: str) -> Expression | None:
    value = in_words(text.replace("«", " ").replace("»", " "))
    return None if value is None else Expression(lambda _: value, frozenset(), text)


def _degrees(text: str, expression: Expression) -> tuple[Expression, Unit | None]:
    """Return an expression whose degrees are its unit, where they do not stand in a function."""
    if r"\deg" not in text or any(re.search(rf"\\?{name}(?![A-Za-z])", text) for name in FUNCTIONS):
        return expression, None
    without = expression_of(text.replace(r"\deg", " "))
    return (expression, None) if without is None else (without, read_unit("degrees"))


def _with_unit(text: str) -> Value | None:
    """Read a number and the unit or the words behind it."""
    for match in itertools.islice(UNIT_AT.finditer(text), MOST_SPLITS if len(text) < 300 else 0):
        number, unit = text[: match.start()].strip(), text[match.start() :].strip()
        is_attached = text[match.start() - 1] not in " »" if match.start() else False
        if (
            not number
            or (is_attached and re.fullmatch(r"[A-Za-z]", unit))
            or (is_attached and re.fullmatch(r"[A-Za-z]\s*(?:\^.*)?[+\-*].*", unit))
        ):
            continue
        if unit.startswith("\\") and not unit.startswith(("\\deg", "\\Omega", "\\mu")):
            continue
        if re.fullmatch(r"[a-zA-Z](?:\s*\^.*)?", unit) and (
            re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", number))
            or unit[0] not in KNOWN
            or unit[0] in "xyznkabcdpqrtuvwefi"
        ):
            continue
        expression = _plain_number(number) or (_in_words(number) if re.search("[a-z]{3}", number) else None)
        if expression is None and re.search(r"[A-Za-z]", number) and "«" in unit and not is_word(number):
            expression = expression_of(number)
        if expression is None:
            continue
        scaled = re.match(r"«?\s*(hundred|thousand|million|billion|trillion|dozen)\b\s*»?\s*", unit)
        if scaled is not None and expression.value is not None:
            expression = _times(expression, in_words(scaled[1]))
            rest = unit[scaled.end() :]
            if not rest:
                return Quantity(expression)
            unit = rest
        if (found := read_unit(unit)) is not None:
            return Quantity(expression, found)
    return None


def _times(expression: Expression, scale: Fraction | None) -> Expression:
    return Expression(lambda point: multiply(expression.compute(point), scale), expression.names, expression.text)


def _with_known_unit(text: str) -> Value | None:
    """Read a number before letters that are units, as ``5 cm``; a single letter needs a space in front of it."""
    match = KNOWN_UNIT_AT.fullmatch(text)
    if match is None or (not match[2] and len(re.split(r"[^A-Za-z]", match[3])[0]) < 2 and "/" not in match[3]):
        return None
    unit = read_unit(match[3])
    expression = None if unit is None or not unit.dimension else _plain_number(match[1])
    return None if expression is None else Quantity(expression, unit)


def read_compound(text: str) -> Value | None:
    """Read several numbers whose units add up, the largest first, as ``1 hour and 30 minutes`` or ``5 ft 3 in``."""
    if (angle := ANGLE.fullmatch(text)) is not None:
        degrees, minutes, seconds = (Fraction(part or 0) for part in angle.groups())
        value = degrees + minutes / 60 + seconds / 3600
        return Quantity(Expression(lambda _: value, frozenset(), text), read_unit("degrees"))
    plain = text.replace("«", " ").replace("»", " ")
    plain = re.sub(r"(\d)\s*'\s*(\d+)\s*(?:\"|'')", r"\1 ft \2 in", plain)
    if COMPOUND.fullmatch(plain.strip()) is None:
        return None
    pieces = re.findall(PIECE, plain.strip())
    units = [read_unit(name) for _, name in pieces]
    if (
        any(unit is None or not unit.dimension for unit in units)
        or len({unit.dimension for unit in units if unit}) != 1
    ):
        return None
    factors = [unit.factor for unit in units if unit]
    if any(larger <= smaller for larger, smaller in itertools.pairwise(factors)):  # a list, as 5 cm and 6 cm
        return None
    total = sum(
        (Fraction(number) * unit.factor for (number, _), unit in zip(pieces, units, strict=True) if unit), Fraction(0)
    )
    # without a unit, 1 h 30 min is 90, but 2 dollars and 30 cents are 2.30
    unit = units[0 if "cent" in pieces[-1][1] else -1]
    assert unit is not None
    total /= unit.factor
    return Quantity(Expression(lambda _: total, frozenset(), text), unit)


def expression_of(text: str) -> Expression | None:
    if "«" in text or not text.strip() or _has_word(text):
        return None
    try:
        found = read_expression(join(text, groups=False))
    except Unreadable:
        return None
    return found if found.names or found.value is not None else None


def _has_word(text: str) -> bool:
    """Return whether letters in a row are a word, and not a product or functions."""
    if SHORT_WORD.search(text) or any(FUNCTION_NAMES.isdisjoint(pair) for pair in TWO_WORDS.findall(text)):
        return True
    for run in re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text):
        left = run
        for name in sorted(FUNCTION_NAMES, key=len, reverse=True):
            left = left.replace(name, " ")
        if any(len(part) > 3 for part in left.split()):
            return True
    return False


def is_word(text: str) -> bool:
    """Return whether a text is nothing but letters in a row, which are a word and no product."""
    return re.fullmatch(r"[A-Za-z]{2,}", text.strip()) is not None and text.strip().lower() not in FUNCTION_NAMES
