"""``read`` returns what an answer means, the most structured reading first."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction
from typing import Final

from rlplug_rewards.answers.expressions import (
    FUNCTIONS,
    Expression,
    Unreadable,
    equal_numbers,
    multiply,
    read_expression,
)
from rlplug_rewards.answers.notation import clean, compact
from rlplug_rewards.answers.numerals import in_base, in_words, join
from rlplug_rewards.answers.regions import ALL, INFINITY, MINUS_INFINITY, read_region
from rlplug_rewards.answers.splitting import balanced, inside, split
from rlplug_rewards.answers.units import CURRENCIES, KNOWN, Unit, read_unit
from rlplug_rewards.answers.values import NOTHING, Clock, Grid, Items, Quantity, Relation, Value, Words

LONGEST: Final = 1500
"""Longest answer in characters."""
DEEPEST: Final = 8
MOST_SPLITS: Final = 12
"""Places at which a number may end and its unit begin."""
CONSTANT_WORDS: Final[dict[str, Value]] = {
    **dict.fromkeys(
        ("no solution", "no solutions", "no real solution", "no real solutions", "empty set", "emptyset", "empty",
            "there is no solution",
         "there are no solutions", "has no solution", "no such x", "no such x exists", "none exist"), NOTHING),
    **dict.fromkeys(
        ("all real numbers", "all reals", "all real number", "all real x", "all real values", "reals",
            "real numbers", "any real number", "mathbb r",
         "every real number", "set of all real numbers", "set of real numbers", "all real values of x",
             "x is any real number", "x in mathbb r"), ALL),
    **dict.fromkeys(("dne", "does not exist", "limit does not exist", "doesn't exist"), Words("dne")),
    **dict.fromkeys(("infinitely many", "infinitely many solutions", "infinite", "infinite solutions",
        "infinite number of solutions"), Words("infinite")),
    **dict.fromkeys(("yes", "true", "correct"), Words("true")),
    **dict.fromkeys(("no", "false"), Words("false")),
    **dict.fromkeys(("infinity", "positive infinity", "plus infinity"), Quantity(INFINITY)),
    **dict.fromkeys(("negative infinity", "minus infinity"), Quantity(MINUS_INFINITY)),
    "pi": Quantity(read_expression(r"\pi")),
    **dict.fromkeys(("noon", "12 noon", "midday"), Clock(43200, True)),
    **dict.fromkeys(("midnight", "12 midnight"), Clock(0, True)),
}  # fmt: skip
TIME: Final = re.compile(
    r"(\d{1,2})(?::([0-5]\d))?(?::([0-5]\d))?\s*(?:(a|p)\.?\s*m\.?|(o'clock))?(?:\s*(?:a|p)\.?m\.?)?", re.IGNORECASE
)
GRID: Final = re.compile(
    r"\\begin\s*\{([pbvBV]?matrix|smallmatrix|array|cases|dcases)\}(?:\s*\{[lcr| ]*\})?(.*?)\\end\s*\{\1\}", re.DOTALL
)
RELATION: Final = re.compile(r"\\(?:le|ge|ne|approx|equiv|in)(?![A-Za-z])|<=|>=|!=|==|[<>=]|\\notin")
SIGNS: Final = {r"\le": "<=", r"\ge": ">=", r"\ne": "!=", "==": "=", r"\approx": "=", r"\equiv": "="}
LABEL: Final = re.compile(
    r"(?:«[^»]*»|[A-Za-z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|sigma|rho|tau|Delta|angle|triangle|overline|bar|measuredangle|mathbb|Omega|pi)(?![A-Za-z])\s*)"
    r"(?:_\{?\w+\}?|'|\^\{-1\}|\^\{\([n\d]\)\})*"
    r"(?:\s*\([\w\s,;|=+\-^{}\\]*\))?"
)
NAMES_OF_LENGTHS: Final = re.compile(
    r"\|?\s*(?:\\(?:overline|bar|angle|triangle|measuredangle)\s*)?\{?\s*[A-Z]{1,4}'?\s*\}?\s*\|?|\\frac\s*\{\s*d\s*\w?\s*\}\s*\{\s*d\s*\w\s*\}|m?\\angle\s*\{?\w+\}?"
)
ANGLE: Final = re.compile(r"(\d+)\s*\\deg\s*(\d+)\s*'\s*(?:(\d+)\s*(?:\"|''))?")
NEGATIVE: Final = re.compile(r"^«?\s*(?:negative|minus)\s*»?\s*(?=[\d\\.$])", re.IGNORECASE)
EXCEPT: Final = re.compile(
    r"«?\s*(?:the set of )?(?:all|any|every) real(?:s| numbers?| values?)?(?: x)?,?\s*(?:except|but|other than"
    r"|excluding)(?: for)?"
    r"\s*(?:x\s*=)?\s*»?\s*(?:x\s*=)?\s*([^»]+?)\s*»?",
    re.IGNORECASE,
)
NAMES: Final = re.compile(r"\(\s*[A-Za-z](?:_\{?\w\}?)?(?:\s*,\s*[A-Za-z](?:_\{?\w\}?)?)+\s*\)")
ABOUT: Final = re.compile(
    r"^(?:\\approx|\\sim|approximately|approx\.?|about|around|roughly|exactly|a total of|just|only|=|:|is|are"
    r"|equals?|equal to|«(?:approximately|approx\.|about|exactly|is)»)\s*(?=\S)",
    re.IGNORECASE,
)
PERCENT: Final = re.compile(
    r"\s*(?:%|«\s*(?:%|percent|per cent|percentage points?)\s*[^»]*»|\b(?:percent|per cent|pct"
    r"|percentage points?)\b)(?:\s*(?:of|chance|probability|increase|decrease|interest|off|discount|profit"
    r"|loss)\b[\w\s]*)?\s*$",
    re.IGNORECASE,
)
UNIT_AT: Final = re.compile(r"(?<=[\d})!\]\s%»$])(?=[A-Za-z«\\¢])")
KNOWN_UNIT_AT: Final = re.compile(r"(-?\s*[\d.,/]*\d\.?|.*[)}])(\s*)([A-Za-z]+(?:[\s/^A-Za-z\d{}*.-]*))")
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
ARTICLES: Final = re.compile(r"\b(?:the|a|an)\b")


def read(text: str) -> Value | None:
    """Return the meaning of an answer as it was written, or ``None`` where it has none."""
    if len(text) > LONGEST:
        return None
    try:
        return read_clean(clean(text))
    except (RecursionError, OverflowError, ArithmeticError):
        return None


def read_clean(text: str, depth: int = 0) -> Value | None:
    """Return the meaning of a text in :mod:`one notation <rlplug_rewards.answers.notation>`."""
    text = _unwrapped(text.strip())
    if not text or depth > DEEPEST or not balanced(text):
        return None
    readers = (
        _constant,
        _grid,
        _time,
        _quantity_of_one,
        _relation,
        read_sets,
        _brackets,
        _list,
        _signs,
        _ratio,
        _quantity,
        _words,
    )
    for reader in readers:
        value = reader(text, depth)
        if value is not None:
            return value
    return None


def _unwrapped(text: str) -> str:
    """Return a text without groups around all of it, and without words of approximation."""
    while True:
        shorter = NEGATIVE.sub("-", ABOUT.sub("", text, count=1), count=1)
        if (inner := inside(shorter, "{", "}")) is not None:
            shorter = inner
        if (inner := inside(shorter, "«", "»")) is not None and re.search(r"\d", inner) and "«" not in inner:
            shorter = inner
        if (inner := inside(shorter, "(", ")")) is not None and len(split(inner, ",;")) == 1:
            shorter = inner
        if shorter == text:
            return text
        text = shorter.strip()


def _constant(text: str, depth: int) -> Value | None:
    if text in ("⦃⦄", r"\emptyset", r"⦃ ⦄"):
        return NOTHING
    if text == r"\mathbb{R}" or text == r"\mathbb R":
        return ALL
    if (excepted := EXCEPT.fullmatch(text)) is not None:
        return read_region(rf"x \ne {excepted[1]}".replace(" and ", ", "))
    if not re.fullmatch(r"(?:12\s)?[«A-Za-z][A-Za-z\s'«».{}\\]*", text):
        return None
    return CONSTANT_WORDS.get(_folded(text.removeprefix("x \\in ")))


def _grid(text: str, depth: int) -> Value | None:
    match = GRID.fullmatch(text) or GRID.fullmatch(re.sub(r"^[a-zA-Z](?:\([a-z]\))?\s*=\s*", "", text))
    if match is None:
        return _nested_lists(text, depth)
    is_cases = match[1] in ("cases", "dcases")
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[2]) if row.strip()]
    cells = []
    for row in rows:
        found = [
            read_clean(_without_if(cell), depth + 1)
            for cell in (row.split("&") if "&" in row or not is_cases else re.split(r",\s*(?=«?\s*if)", row))
        ]
        if any(cell is None for cell in found):
            return None
        cells.append(tuple(cell for cell in found if cell is not None))
    return Grid(tuple(cells), is_cases) if cells else None


def _nested_lists(text: str, depth: int) -> Value | None:
    inner = inside(text, "[", "]")
    if inner is None or not inner.strip().startswith("["):
        return None
    rows = [inside(row.strip(), "[", "]") for row in split(inner, ",")]
    cells = [[read_clean(cell, depth + 1) for cell in split(row, ",")] for row in rows if row is not None]
    if len(cells) != len(rows) or any(cell is None for row in cells for cell in row):
        return None
    return Grid(tuple(tuple(cell for cell in row if cell is not None) for row in cells))


def _without_if(cell: str) -> str:
    cell = re.sub(r"^\s*,?\s*(?:«\s*)?(?:if|for|when|where)\b\s*»?\s*|,\s*$", "", cell.strip())
    return re.sub(r"^«([^»]*)»$", r"\1", cell.strip()).strip(" ,.") or "otherwise"


def _time(text: str, depth: int) -> Value | None:
    plain = text.replace("«", " ").replace("»", " ").strip()
    match = TIME.fullmatch(re.sub(r"\s+", " ", plain))
    if match is None or not (match[2] or match[4] or match[5]):
        return None
    hour, minute, second = int(match[1]), int(match[2] or 0), int(match[3] or 0)
    half = (match[4] or "").lower()
    if hour > 24 or (half and hour > 12):
        return None
    ratio = None
    if match[2] and not half and not match[5]:
        ratio = _ratio(text, depth)
    if half:
        hour = hour % 12 + (12 if half == "p" else 0)
    return Clock(
        hour % 24 * 3600 + minute * 60 + second,
        bool(half) or hour > 12 or hour == 0,
        ratio if isinstance(ratio, Items) else None,
    )


def _quantity_of_one(text: str, depth: int) -> Value | None:
    """Read a numeral of its own: in words, or of another base."""
    plain = text.replace("«", " ").replace("»", " ").strip()
    value = in_base(plain if "«" in text else text)
    if value is None and re.fullmatch(r"-?[\d.]*[A-Za-z\s-]+", plain):
        value = in_words(plain)
    if value is None and (match := re.fullmatch(r"(-?\d+)\s*(?:\^?\{?«?\s*(?:st|nd|rd|th)\s*»?\}?)", text)):
        return _quantity(match[1], depth)
    if value is None:
        return None
    return Quantity(Expression(lambda _: value, frozenset(), text))


# ---- relations ------------------------------------------------------------------------------------------------------


def _relation(text: str, depth: int) -> Value | None:
    if (
        re.search(r"(?<![A-Za-z])(?:and|or)(?![A-Za-z])|\\l(?:and|or)(?![A-Za-z])|\\cup|⦃", text)
        or len(split(text, ",;")) > 1
    ):
        return None
    parts, signs = _sides(text)
    if not signs:
        return None
    if set(signs) == {"="}:
        return _equation(parts, depth)
    if signs == [r"\in"]:
        return None
    left, right = _expression(parts[0]), _expression(parts[-1])
    if len(signs) == 1 and left is not None and right is not None and (left.names or right.names):
        region = read_region(text)
        if region is not None:
            return region
        if signs[0] in (">", ">="):
            return Relation("<" if signs[0] == ">" else "<=", "", right, Quantity(left))
        return Relation(signs[0], "", left, Quantity(right))
    return read_region(text)


def _sides(text: str) -> tuple[list[str], list[str]]:
    """Return what stands between signs of relation outside brackets, and the signs."""
    parts, signs, at = [], [], 0
    for match in RELATION.finditer(text):
        before = text[at : match.start()]
        if not balanced(before):
            continue
        parts.append(before.strip())
        signs.append(SIGNS.get(match[0], match[0]))
        at = match.end()
    return [*parts, text[at:].strip()], signs


def _equation(parts: list[str], depth: int) -> Value | None:
    name = parts[0]
    value = read_clean(parts[-1], depth + 1)
    if not name or value is None:
        return value if len(parts) > 1 else None
    is_label = LABEL.fullmatch(name) or NAMES_OF_LENGTHS.fullmatch(name) or _is_phrase(name) or NAMES.fullmatch(name)
    left = _expression(name)
    if is_label:
        return Relation("=", compact(name), left, value)
    if isinstance(value, Quantity) and left is not None:
        if not left.names and not value.expression.names:
            sides = [_expression(part) for part in parts[:-1]]
            same = all(side is not None and (side.names or equal_numbers(side, value.expression)) for side in sides)
            return value if same or value.unit is not None or value.is_percent else None
        return Relation("=", "", left, value)
    return None


def _is_phrase(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z][A-Za-z\s«»'-]{2,60}", name) is not None and any(
        len(word) > 3 and word.lower() not in FUNCTION_NAMES for word in re.findall(r"[A-Za-z]+", name)
    )


# ---- several values -------------------------------------------------------------------------------------------------


def read_sets(text: str, depth: int) -> Value | None:
    r"""Read unions, conditions that "or" and "and" join, ``x \in ...`` and sets in braces."""
    match = re.fullmatch(r"(\w+(?:_\{?\w+\}?)?)\s*\\in\s*(.+)", text)
    if match is not None and not RELATION.search(match[2]):
        return read_clean(match[2], depth + 1)
    if (inner := inside(text, "⦃", "⦄")) is not None:
        builder = re.fullmatch(r"\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?[|:]\s*(.+)", inner)
        if builder is not None:
            return read_clean(builder[1], depth + 1)
        parts = _parts(inner, depth)
        return None if parts is None else Items("⦃⦄", _flat(parts))
    if re.search(r"\\(?:cup|cap|setminus|le|ge|ne|in)(?![A-Za-z])|[<>]|\\mathbb|^[\[(\]].*,.*[\])\[]$", text):
        return read_region(text)
    return None


def _brackets(text: str, depth: int) -> Value | None:
    for opens, closes in (("(", ")"), ("[", "]"), ("\\langle", "\\rangle"), ("<", ">")):
        inner = inside(text, opens, closes)
        if inner is None:
            continue
        parts = _parts(inner, depth)
        if parts is None:
            return None
        brackets = "⟨⟩" if opens in ("\\langle", "<") else opens + closes
        if len(parts) > 1 or opens != "(":
            return Items(brackets, parts) if len(parts) > 1 else parts[0]
    return None


def _parts(inner: str, depth: int) -> tuple[Value, ...] | None:
    """Return the values in brackets. Commas with a space behind separate; then those without may be thousands."""
    commas = re.findall(r",(\s?)", inner)
    has_thousands = "" in commas and " " in commas
    pieces = split(join(inner, groups=True) if has_thousands else inner, ",;")
    values = [read_clean(piece, depth + 1) for piece in pieces]
    if not values or any(value is None for value in values):
        return None
    return tuple(value for value in values if value is not None)


def _list(text: str, depth: int) -> Value | None:
    text = re.sub(r"«\s*(and|or)\s*»", r" \1 ", text)
    text = re.sub(r"«\s*(and|or)\s+([^»]*)»", r" \1 «\2»", text)
    text = re.sub(r"^(?:both|either)\s+", "", text)
    joined = join(text)
    pieces = split(joined, ",;")
    pieces = [part for piece in pieces for part in _split_words(piece)]
    pieces = [
        part
        for piece in pieces
        for part in re.split(r"\\\\|\\l(?:and|or)(?![A-Za-z])", piece)
        if balanced(part) or True
    ]
    pieces = [piece.strip() for piece in pieces if piece.strip()]
    if len(pieces) < 2 or len(pieces) > 200:
        return None
    values = [read_clean(piece, depth + 1) for piece in pieces]
    if any(value is None for value in values):
        return None
    found = tuple(value for value in values if value is not None)
    last = found[-1]
    if (
        isinstance(last, Quantity)
        and last.unit is not None
        and all(isinstance(each, Quantity) and each.unit is None for each in found[:-1])
    ):
        found = tuple(
            Quantity(each.expression, last.unit, each.is_percent) for each in found if isinstance(each, Quantity)
        )
    return Items("", _flat(found))


def _flat(values: tuple[Value, ...]) -> tuple[Value, ...]:
    r"""Return values of which those that are lists themselves, such as ``\pm 3``, are several."""
    return tuple(
        part
        for value in values
        for part in (value.parts if isinstance(value, Items) and not value.brackets else (value,))
    )


def _split_words(text: str) -> list[str]:
    return re.split(r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", text)


def _signs(text: str, depth: int) -> Value | None:
    r"""Read ``a \pm b`` as the two values ``a + b`` and ``a - b``."""
    if len(re.findall(r"\\pm(?![A-Za-z])", text)) != 1:
        return None
    upper = read_clean(re.sub(r"\\pm(?![A-Za-z])", "+", text).replace(r"\mp", "-"), depth + 1)
    lower = read_clean(re.sub(r"\\pm(?![A-Za-z])", "-", text).replace(r"\mp", "+"), depth + 1)
    if upper is None or lower is None or isinstance(upper, Words):
        return None
    if isinstance(upper, Relation) and isinstance(lower, Relation) and upper.label:
        return Items("", (upper, lower))
    return Items("", (upper, lower))


def _ratio(text: str, depth: int) -> Value | None:
    parts = split(text, ":") if ":" in text else re.split(r"(?<=\d)\s+to\s+(?=\d)", text)
    if not 2 <= len(parts) <= 6:
        return None
    values = [_expression(join(part)) for part in parts]
    if any(value is None for value in values):
        return None
    return Items(":", tuple(Quantity(value) for value in values if value is not None))


# ---- one value ------------------------------------------------------------------------------------------------------


def _quantity(text: str, depth: int) -> Value | None:
    text = re.sub(r"(?<=\d)\s*\\Omega\s*$", " ohms", join(text))
    shorter = PERCENT.sub("", text)
    if shorter != text:
        expression = _expression(shorter)
        return None if expression is None else Quantity(expression, is_percent=True)
    if (
        match := re.fullmatch(
            r"(.+?)\s*\(?\\(?:pmod|bmod|mod)\s*\{?\s*(\d+)\s*\}?\)?|(.+?)\s*\(?\bmod\s*(\d+)\)?", text
        )
    ) is not None:
        expression = _expression(match[1] or match[3])
        return (
            None if expression is None else Quantity(expression, Unit(words=frozenset({f"mod{match[2] or match[4]}"})))
        )
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
    if (quantity := _compound(text) or _with_known_unit(text)) is not None:
        return quantity
    if (expression := _expression(text)) is not None and not _is_word(text):
        return Quantity(*_degrees(text, expression))
    return _with_unit(text)


def _plain_number(text: str) -> Expression | None:
    expression = _expression(text)
    return expression if expression is None or not expression.names else None


def _in_words(text: str) -> Expression | None:
    value = in_words(text.replace("«", " ").replace("»", " "))
    return None if value is None else Expression(lambda _: value, frozenset(), text)


def _degrees(text: str, expression: Expression) -> tuple[Expression, Unit | None]:
    """Return an expression whose degrees are its unit, where they do not stand in a function."""
    if r"\deg" not in text or any(re.search(rf"\\?{name}(?![A-Za-z])", text) for name in FUNCTIONS):
        return expression, None
    without = _expression(text.replace(r"\deg", " "))
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
        if expression is None and re.search(r"[A-Za-z]", number) and "«" in unit and not _is_word(number):
            expression = _expression(number)
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


def _compound(text: str) -> Value | None:
    """Read several numbers with units that add up, as ``1 hour 30 minutes`` or ``5 ft 3 in``."""
    if (angle := ANGLE.fullmatch(text)) is not None:
        degrees, minutes, seconds = (Fraction(part or 0) for part in angle.groups())
        value = degrees + minutes / 60 + seconds / 3600
        return Quantity(Expression(lambda _: value, frozenset(), text), read_unit("degrees"))
    plain = text.replace("«", " ").replace("»", " ")
    plain = re.sub(r"(\d)\s*'\s*(\d+)\s*(?:\"|'')", r"\1 ft \2 in", plain)
    pieces = re.findall(r"(?<![\d.])(\d++(?:\.\d++)?)\s*([A-Za-z]++)\.?(?:\s*(?:,|and)\s*|\s+|(?=\d)|$)", plain)
    if len(pieces) < 2 or re.sub(r"[\d.\s,]|and|[A-Za-z]", "", plain):
        return None
    units = [read_unit(name) for _, name in pieces]
    if (
        any(unit is None or not unit.dimension for unit in units)
        or len({unit.dimension for unit in units if unit}) != 1
    ):
        return None
    total = sum(
        (Fraction(number) * unit.factor for (number, _), unit in zip(pieces, units, strict=True) if unit), Fraction(0)
    )
    last = units[-1]
    assert last is not None
    total /= last.factor
    return Quantity(Expression(lambda _: total, frozenset(), text), last)


def _expression(text: str) -> Expression | None:
    if "«" in text or not text.strip() or _has_word(text):
        return None
    try:
        found = read_expression(join(text, groups=False))
    except Unreadable:
        return None
    return found if found.names or found.value is not None else None


def _has_word(text: str) -> bool:
    """Return whether letters in a row are a word, and not a product or functions."""
    for run in re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text):
        left = run
        for name in sorted(FUNCTION_NAMES, key=len, reverse=True):
            left = left.replace(name, " ")
        if any(len(part) > 3 for part in left.split()):
            return True
    return False


def _is_word(text: str) -> bool:
    """Return whether a text is nothing but letters in a row, which are a word and no product."""
    return re.fullmatch(r"[A-Za-z]{2,}", text.strip()) is not None and text.strip().lower() not in FUNCTION_NAMES


def _words(text: str, depth: int) -> Value | None:
    if re.search(r"\\[A-Za-z]", text) or (re.search(r"[\^{}=<>⦃⦄_]", text) and "«" not in text):
        return Words(compact(text), is_literal=True)
    folded = _folded(text)
    product = _expression(text) if re.fullmatch(r"[A-Za-z]{2,3}", text) else None
    return (
        Words(folded, product=product)
        if folded and re.search(r"[^\W\d]", folded)
        else Words(compact(text), is_literal=True)
    )


def _folded(text: str) -> str:
    text = re.sub(r"[«»\"`*_{}\\,.;:!?()]|^\W+|\W+$", " ", text.casefold())
    return " ".join(ARTICLES.sub(" ", text).split())
