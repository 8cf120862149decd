"""``read`` returns what an answer means, the most structured reading first."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Final

from rlplug_rewards.answers.arithmetic import determinant
from rlplug_rewards.answers.counting import read_count
from rlplug_rewards.answers.expressions import Expression, equal, equal_numbers
from rlplug_rewards.answers.notation import clean, compact
from rlplug_rewards.answers.numerals import join
from rlplug_rewards.answers.quantities import (
    FUNCTION_NAMES,
    expression_of,
    read_compound,
    read_numeral,
    read_quantity,
    read_ratio,
    read_time,
)
from rlplug_rewards.answers.regions import BUILDER, read_region
from rlplug_rewards.answers.splitting import balanced, inside, split
from rlplug_rewards.answers.values import Count, Grid, Items, Quantity, Relation, Value, Words
from rlplug_rewards.answers.wording import read_constant, read_words

LONGEST: Final = 1500
"""Longest answer in characters."""
DEEPEST: Final = 8
LARGEST_DETERMINANT: Final = 5
GRID: Final = re.compile(
    r"\\begin\s*\{([pbvBV]?matrix|smallmatrix|array|cases|dcases)\}(?:\s*\{[lcr| ]*\})?(.*?)\\end\s*\{\1\}", re.DOTALL
)
RELATION: Final = re.compile(r"\\(?:le|ge|ne|approx|equiv|in)(?![A-Za-z])|<=|>=|!=|==|[<>=]|\\notin")
SIGNS: Final = {r"\le": "<=", r"\ge": ">=", r"\ne": "!=", "==": "=", r"\approx": "=", r"\equiv": "="}
LABEL: Final = re.compile(
    r"(?:«[^»]*»|[A-Za-z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|sigma|rho|tau|Delta|angle|triangle|overline|bar|measuredangle|mathbb|Omega|pi)(?![A-Za-z])\s*)"
    r"(?:_\{?\w+\}?|'|\^\{-1\}|\^\{\([n\d]\)\})*"
    r"(?:\s*\([\w\s,;|=+\-^{}\\<>«»]*\))?"
)
NAMES_OF_LENGTHS: Final = re.compile(
    r"\|?\s*(?:\\(?:overline|bar|angle|triangle|measuredangle)\s*)?\{?\s*[A-Z]{1,4}'?\s*\}?\s*\|?|\\frac\s*\{\s*d\s*\w?\s*\}\s*\{\s*d\s*\w\s*\}|m?\\angle\s*\{?\w+\}?"
    r"|\[\s*[A-Z]{3,6}\s*\]|\\(?:max|min|sup|inf)(?![A-Za-z])[^=]*|\\?#\s*\\?\w+|\\(?:i{0,3}int|oint|lim)(?![A-Za-z])[^=]*"
)
NEGATIVE: Final = re.compile(r"^«?\s*(?:negative|minus)\s*»?\s*(?=[\d\\.$])", re.IGNORECASE)
NAMES: Final = re.compile(
    r"\(\s*(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w\}?)?(?:\s*,\s*(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w\}?)?)+\s*\)"
)
ABOUT: Final = re.compile(
    r"^(?:\\approx|\\sim|=|:|(?:approximately|approx\b\.?|about|around|roughly|exactly|a total of|just|only|is|are"
    r"|equals?|equal to)(?!\w)|«(?:approximately|approx\.|about|exactly|is)»)\s*(?=\S)",
    re.IGNORECASE,
)
SEPARATOR: Final = re.compile(r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\\\|\\l(?:and|or)(?![A-Za-z])")
"""What separates the values of a list beside commas and semicolons."""
UNIT_VECTOR: Final = re.compile(
    r"\s*([+-]?)\s*([^+-]*?)\s*\\(?:mathbf|boldsymbol|bm|hat|vec|textbf)\s*\{?\s*\\?([ijk])(?:math)?\s*\}?\s*"
)


@lru_cache(maxsize=256)
def read(text: str) -> Value | None:
    """Return the meaning of an answer as it was written, or ``None`` where it has none."""
    if len(text) > LONGEST:
        return None
    try:
        return read_clean(clean(_as_components(text)))
    except (RecursionError, OverflowError, ArithmeticError):
        return None


def _as_components(text: str) -> str:
    r"""Return ``\mathbf{i} + 2\mathbf{j}`` as ``(1, 2)``, and any other text as it is."""
    terms = list(UNIT_VECTOR.finditer(text.strip(" $")))
    names = [term[3] for term in terms]
    if len(terms) < 2 or len(set(names)) < len(names) or "".join(term[0] for term in terms) != text.strip(" $"):
        return text
    found = {term[3]: f"{term[1]}{term[2] or 1}" for term in terms}
    return f"({', '.join(found.get(name, '0') for name in ('ijk' if 'k' in found else 'ij'))})"


def read_clean(text: str, depth: int = 0) -> Value | None:
    """Return the meaning of a text in :mod:`one notation <rlplug_rewards.answers.notation>`."""
    text = _unwrapped(text.strip())
    if not text or depth > DEEPEST or not balanced(text):
        return None
    number = read_count(text)
    value = _read(text, depth)
    return value if number is None else Count(number, value)


def _read(text: str, depth: int) -> Value | None:
    return (
        read_constant(text)
        or _grid(text, depth)
        or read_time(text)
        or read_numeral(text)
        or _relation(text, depth)
        or read_sets(text, depth)
        or _brackets(text, depth)
        or read_compound(text)
        or _list(text, depth)
        or _signs(text, depth)
        or read_ratio(text)
        or read_quantity(text)
        or read_words(text)
    )


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


def _grid(text: str, depth: int) -> Value | None:
    text = re.sub(r"^[a-zA-Z](?:\([a-z]\))?\s*=\s*", "", text)
    factor, begin, rest = text.partition(r"\begin")
    factor = {"": "", "-": "-1"}.get(factor.strip(), factor.strip())
    match = GRID.fullmatch(begin + rest)
    if match is None:
        return _nested_lists(text, depth)
    is_cases = match[1] in ("cases", "dcases")
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[2]) if row.strip()]
    cells = []
    for row in rows:
        found = [
            read_clean(f"({factor})({cell})" if factor else _without_if(cell), depth + 1)
            for cell in (row.split("&") if "&" in row or not is_cases else re.split(r",\s*(?=«?\s*if)", row))
        ]
        if any(cell is None for cell in found):
            return None
        cells.append(tuple(cell for cell in found if cell is not None))
    if match[1] == "vmatrix":
        return None if factor else _determinant(cells, text)
    return Grid(tuple(cells), is_cases) if cells else None


def _determinant(rows: list[tuple[Value, ...]], text: str) -> Value | None:
    cells = [[cell.expression for cell in row if isinstance(cell, Quantity) and cell.unit is None] for row in rows]
    if not 1 <= len(cells) <= LARGEST_DETERMINANT or any(len(row) != len(cells) for row in cells):
        return None
    entries = [entry for row in cells for entry in row]
    return Quantity(
        Expression(
            lambda point: determinant([[entry.compute(point) for entry in row] for row in cells]),
            frozenset(name for entry in entries for name in entry.names),
            text,
            whole=frozenset(name for entry in entries for name in entry.whole),
        )
    )


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
    left, right = expression_of(parts[0]), expression_of(parts[-1])
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
    left, number = expression_of(name), read_count(name)
    if isinstance(value, Quantity) and not value.expression.names and not LABEL.fullmatch(name):
        sides = [_side(part) for part in parts[:-1]]
        same = all(side is not None and (side.names or equal_numbers(side, value.expression)) for side in sides)
        if same and number is not None:
            return value
        if left is not None and not left.names:
            return value if same or value.unit is not None or value.is_percent else None
    is_label = LABEL.fullmatch(name) or NAMES_OF_LENGTHS.fullmatch(name) or _is_phrase(name) or NAMES.fullmatch(name)
    if is_label:
        return Relation("=", compact(name), left, value)
    if isinstance(value, Quantity) and left is not None:
        is_identity = bool(left.names) and equal(left, value.expression)
        return value if is_identity else Relation("=", "", left, value)
    return None


def _side(text: str) -> Expression | None:
    """Return one side of an equation of numbers, in which a count is a number."""
    number = read_count(text)
    return expression_of(text) if number is None else number.expression


def _is_phrase(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z][A-Za-z\s«»'-]{2,60}", name) is not None and any(
        len(word) > 3 and word.lower() not in FUNCTION_NAMES for word in re.findall(r"[A-Za-z]+", name)
    )


# ---- several values -------------------------------------------------------------------------------------------------


def read_sets(text: str, depth: int) -> Value | None:
    r"""Read unions, conditions that "or" and "and" join, ``x \in ...`` and sets in braces."""
    match = re.fullmatch(r"(\w+(?:_\{?\w+\}?)?|\(\w(?:,\s*\w)+\))\s*\\in\s*(.+)", text)
    if match is not None and not RELATION.search(match[2]):
        return read_clean(match[2], depth + 1)
    if (inner := inside(text, "⦃", "⦄")) is not None:
        if (builder := BUILDER.fullmatch(inner)) is not None:
            return read_clean(builder[1], depth + 1)
        parts = _parts(inner, depth)
        return None if parts is None else Items("⦃⦄", _flat(parts))
    if re.search(r"\\(?:cup|cap|setminus|le|ge|ne|in)(?![A-Za-z])|[<>]|\\mathbb|^[\[(\]].*,.*[\])\[]$", text):
        return read_region(text)
    return None


def _brackets(text: str, depth: int) -> Value | None:
    text = re.sub(r"^[A-Z]\s*(?=\([^()]*,[^()]*\)$)", "", text)  # a point's name
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
    pieces = [part.strip() for piece in split(join(text), ",;") for part in SEPARATOR.split(piece) if part.strip()]
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
    return tuple(part for value in values for part in _each(value))


def _each(value: Value) -> tuple[Value, ...]:
    if isinstance(value, Relation) and value.label and isinstance(value.right, Items) and not value.right.brackets:
        return tuple(replace(value, right=part) for part in value.right.parts)
    return value.parts if isinstance(value, Items) and not value.brackets else (value,)


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
