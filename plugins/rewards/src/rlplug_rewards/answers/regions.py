r"""Sets of real numbers: intervals, inequalities, unions, and all numbers but some.

``(2, 5)``, ``2 < x < 5`` and ``x \in (2, 5)`` are the same region, and ``x < 1 or x > 2`` is a union.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cmp_to_key
from typing import Final

import mpmath

from rlplug_rewards.answers.expressions import Expression, equal_numbers, read_expression
from rlplug_rewards.answers.numerals import join
from rlplug_rewards.answers.splitting import inside, split
from rlplug_rewards.answers.tokens import Unreadable
from rlplug_rewards.answers.values import Region, Span

INFINITY: Final = read_expression(r"\infty")
MINUS_INFINITY: Final = read_expression(r"-\infty")
WHOLE: Final = Span(MINUS_INFINITY, INFINITY, False, False)
ALL: Final = Region((WHOLE,))
COMPARISON: Final = re.compile(r"(\\(?:le|ge|ne)(?![A-Za-z])|<=|>=|!=|<|>)")
FLIPPED: Final = {">": "<", ">=": "<="}
DISTANCE: Final = re.compile(
    r"\|\s*([A-Za-z])\s*([+-][^|A-Za-z]+)?\|\s*(\\(?:le|ge)(?![A-Za-z])|<=|>=|<|>)\s*([^<>=|,;]+)"
)
"""A symbol's distance from a number, such as ``|x - 2| < 3``."""
BUILDER: Final = re.compile(r"\s*(?:[a-z]|\([a-z](?:,\s*[a-z])+\))\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?[|:]\s*(.+)")
"""What stands in braces around the condition of a set."""
UNION: Final = re.compile(r"(?<![A-Za-z])or(?![A-Za-z])|\\(?:lor|cup)(?![A-Za-z])")
MINUS: Final = re.compile(r"\\setminus(?![A-Za-z])|(?<=\\mathbb\{R\})\s*-|-(?=\s*⦃)")
PLAIN: Final = {r"\le": "<=", r"\ge": ">=", r"\ne": "!="}


def read_region(text: str, is_part: bool = False) -> Region | None:
    """Return a region, or ``None`` where a text is none.

    Args:
        text: Such as ``(2, 5) \\cup [6, 7)``.
        is_part: Whether it is a part of a union, where ``(2, 5)`` is no pair.
    """
    text = re.sub(r"«\s*(?:and|or)\s*»", lambda match: match[0].strip("« »").join("  "), text)
    text = re.sub(r"^[A-Za-z]\s*\\in\s*(?!\\mathbb)", "", text.strip())
    if (inner := inside(text, "⦃", "⦄")) is not None and (builder := BUILDER.fullmatch(inner)) is not None:
        return read_region(builder[1])
    if (distance := DISTANCE.fullmatch(text)) is not None:
        sign, most = PLAIN.get(distance[3], distance[3]), distance[4]
        center = f"-({distance[2]})" if distance[2] else ""
        low, high = f"-({most}){center}", f"{most}{center}"
        if sign in ("<", "<="):
            return read_region(f"{low} {sign} {distance[1]} {sign} {high}")
        return read_region(f"{distance[1]} {FLIPPED[sign]} {low} or {distance[1]} {sign} {high}")
    if len(parts := UNION.split(text)) > 1:
        return _joined([read_region(part, True) for part in parts])
    if (minus := MINUS.search(text)) is not None:
        removed = text[minus.end() :].strip()
        part = _made([Span(at, at, True, True) for at in _points(removed)]) if "⦃" in removed else None
        return _without(read_region(text[: minus.start()], True), part or read_region(removed, True))
    if text.strip() in (r"\mathbb{R}", r"\mathbb R"):
        return ALL
    if re.fullmatch(r"\s*[A-Za-z]\s*\\ne(?![A-Za-z])[^<>=]*", text) and r"\ne" not in text.partition(r"\ne")[2]:
        return _inequality(text.replace(" and ", ", "))
    parts = [
        part
        for part in re.split(r"(?<![A-Za-z])and(?![A-Za-z])|\\land(?![A-Za-z])|\\cap(?![A-Za-z])", text)
        if part.strip()
    ]
    if len(parts) == 1 and COMPARISON.search(text):
        parts = split(text, ",;")
    if len(parts) > 1:
        regions = [read_region(part, is_part or r"\cap" in text) for part in parts]
        both = _common(regions)
        return _joined(regions) if both is not None and not both.spans and len(split(text, ",;")) > 1 else both
    return _interval(text.strip(), is_part) or _inequality(text.strip())


def _interval(text: str, is_part: bool) -> Region | None:
    match = re.fullmatch(r"([\[(\]])(.+)([\])\[])", text)
    if match is None:
        return None
    ends = split(match[2], ",;")
    if len(ends) != 2:
        return None
    low, high = (_real(end) for end in ends)
    if low is None or high is None:
        return None
    is_pair = match[1] + match[3] in ("()", "[]") and not is_part
    if is_pair and not (low.text == r"-\infty" or _is_infinite(low) or _is_infinite(high)):
        return None
    return _made([Span(low, high, match[1] == "[", match[3] == "]")])


def pair_as_region(brackets: str, low: Expression, high: Expression) -> Region | None:
    """Return the interval that a pair in ``()`` or ``[]`` may be."""
    if low.names or high.names or brackets not in ("()", "[]") or _compare(low, high) > 0:
        return None
    return _made([Span(low, high, brackets == "[]", brackets == "[]")])


def _inequality(text: str) -> Region | None:
    pieces = [piece.strip() for piece in COMPARISON.split(text)]
    sides, signs = pieces[::2], [PLAIN.get(sign, sign) for sign in pieces[1::2]]
    if len(signs) not in (1, 2) or any(not side for side in sides):
        return None
    if len(signs) == 2:
        if all(sign in FLIPPED for sign in signs):
            sides, signs = sides[::-1], [FLIPPED[sign] for sign in signs[::-1]]
        low, high = _real(sides[0]), _real(sides[2])
        if low is None or high is None or not _name(sides[1]) or any(sign not in ("<", "<=") for sign in signs):
            return None
        return _named(_made([Span(low, high, signs[0] == "<=", signs[1] == "<=")]), sides[1])
    (left, right), (sign,) = sides, signs
    if not _name(left):
        left, right = right, left
        sign = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}.get(sign, sign)
    if not _name(left):
        return None
    bounds = [_real(bound) for bound in split(right, ",")] if sign == "!=" else [_real(right)]
    if any(bound is None for bound in bounds):
        return None
    ends = [bound for bound in bounds if bound is not None]
    if sign == "!=":
        return _named(_without(ALL, _made([Span(end, end, True, True) for end in ends])), left)
    is_closed = sign.endswith("=")
    span = (
        Span(MINUS_INFINITY, ends[0], False, is_closed) if sign[0] == "<" else Span(ends[0], INFINITY, is_closed, False)
    )
    return _named(_made([span]), left)


def _name(text: str) -> str:
    return (
        text
        if re.fullmatch(
            r"[A-Za-z]|\\(?:alpha|beta|theta|lambda|mu|phi)|[A-Za-z]_\{?\w\}?|[a-z]\s*\([a-z]\)", text.strip()
        )
        else ""
    )


def _named(region: Region | None, name: str) -> Region | None:
    return None if region is None else Region(region.spans, name.strip())


def _real(text: str) -> Expression | None:
    try:
        found = read_expression(join(text.strip().lstrip("+"), groups=False))
    except Unreadable:
        return None
    if found.names or found.value is None:
        return None
    with mpmath.workdps(60):
        value = found.value
        return found if not isinstance(value, mpmath.mpc) or mpmath.im(value) == 0 else None


def _is_infinite(end: Expression) -> bool:
    return end.value is not None and bool(mpmath.isinf(_number(end)))


def _number(end: Expression) -> mpmath.mpf:
    value = end.value
    assert value is not None
    return mpmath.re(value) if not hasattr(value, "numerator") else mpmath.mpf(value.numerator) / value.denominator


def _compare(one: Expression, other: Expression) -> int:
    with mpmath.workdps(60):
        if equal_numbers(one, other):
            return 0
        return -1 if _number(one) < _number(other) else 1


def _points(text: str) -> list[Expression]:
    points = [_real(part) for part in split(text.strip(" ⦃⦄"), ",")]
    return [point for point in points if point is not None]


def _without(region: Region | None, removed: Region | None) -> Region | None:
    """Return what is left of a region, or ``None`` where nothing or nobody knows what is removed."""
    if removed is None or not removed.spans:
        return None
    gaps, low, has_low = [], MINUS_INFINITY, False
    for span in removed.spans:
        if _compare(low, span.low) < 0 or (has_low and not span.has_low):
            gaps.append(Span(low, span.low, has_low, not span.has_low))
        low, has_low = span.high, not span.has_high
    if _compare(low, INFINITY) < 0:
        gaps.append(Span(low, INFINITY, has_low, False))
    return _common([region, Region(tuple(gaps))])


def _joined(regions: Iterable[Region | None]) -> Region | None:
    found = list(regions)
    if any(region is None for region in found):
        return None
    known = [region for region in found if region is not None]
    names = {region.name for region in known if region.name}
    if len(names) > 1:
        return None
    return Region(_made([span for region in known for span in region.spans]).spans, next(iter(names), ""))


def _common(regions: Iterable[Region | None]) -> Region | None:
    found = list(regions)
    names = {region.name for region in found if region is not None and region.name}
    if any(region is None for region in found) or len(names) > 1:
        return None
    spans: list[Span] = [WHOLE]
    for region in found:
        assert region is not None
        spans = [span for one in spans for other in region.spans if (span := _overlap(one, other)) is not None]
    return Region(_made(spans).spans, next(iter(names), ""))


def _overlap(one: Span, other: Span) -> Span | None:
    lows, highs = _compare(one.low, other.low), _compare(one.high, other.high)
    low, has_low = (one.low, one.has_low) if lows > 0 else (other.low, other.has_low)
    high, has_high = (one.high, one.has_high) if highs < 0 else (other.high, other.has_high)
    has_low = has_low and (lows != 0 or one.has_low)
    has_high = has_high and (highs != 0 or one.has_high)
    order = _compare(low, high)
    return Span(low, high, has_low, has_high) if order < 0 or (order == 0 and has_low and has_high) else None


def _made(spans: list[Span]) -> Region:
    """Return a region of spans in order, of which those that touch are one."""

    def in_order(one: Span, other: Span) -> int:
        return _compare(one.low, other.low) or other.has_low - one.has_low

    ordered = sorted(spans, key=cmp_to_key(in_order))
    merged: list[Span] = []
    for span in ordered:
        if _compare(span.low, span.high) > 0:
            continue
        last = merged[-1] if merged else None
        order = 1 if last is None else _compare(span.low, last.high)
        if last is None or order > 0 or (order == 0 and not (span.has_low or last.has_high)):
            merged.append(span)
            continue
        further = _compare(span.high, last.high)
        high, has_high = (
            (span.high, span.has_high)
            if further > 0
            else (last.high, last.has_high or (further == 0 and span.has_high))
        )
        merged[-1] = Span(last.low, high, last.has_low, has_high)
    return Region(tuple(merged))
