"""Algebraic expressions, which are equal when they have the same value at random points.

Nothing is simplified, so nothing runs for ever, and a number that is too large is refused before it is computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Final

import mpmath

from rlplug_rewards.answers.arithmetic import DIGITS, Number, as_float, real_part
from rlplug_rewards.answers.expression_grammar import Compute
from rlplug_rewards.answers.expression_parser import Parser
from rlplug_rewards.answers.tokens import Unreadable

WHOLE: Final = (1, 2, 3, 4, 5, 6, 7, 9, 10, 12)
"""Whole numbers at which expressions are compared."""

SMALLEST: Final = mpmath.mpf(10) ** -40
"""Difference below which it may be an error of rounding, with ``DIGITS`` digits."""


@dataclass(frozen=True)
class Expression:
    """An expression with its free symbols.

    Attributes:
        compute: Its value for values of its symbols.
        names: Its free symbols.
        places: Decimal places where it is a decimal alone, with significant digits, else ``None``.
        whole: Those of its symbols that are whole numbers, since it makes no sense for others.
    """

    compute: Compute
    names: frozenset[str]
    text: str
    places: tuple[int, int] | None = None
    whole: frozenset[str] = frozenset()

    @cached_property
    def value(self) -> Number | None:
        """The value of an expression without symbols; ``None`` where it has none."""
        return None if self.names else self.at({})

    def renamed(self, old: str, new: str) -> Expression:
        """Return the same with another letter for one of its symbols; it has no symbol of that name yet."""
        names, whole = (frozenset(new if name == old else name for name in each) for each in (self.names, self.whole))
        return Expression(lambda point: self.compute({**point, old: point[new]}), names, self.text, whole=whole)

    def at(self, point: Mapping[str, Number], digits: int = DIGITS) -> Number | None:
        """Return the value at a point, or ``None`` where there is none."""
        with mpmath.workdps(digits):
            try:
                value = self.compute(point)
                return value if isinstance(value, Fraction) or not mpmath.isnan(value) else None
            except (ArithmeticError, ValueError, TypeError, mpmath.libmp.ComplexResult, RecursionError):
                return None


@lru_cache(maxsize=256)
def read_expression(text: str) -> Expression:
    """Return an expression.

    Raises:
        Unreadable: It is none.
    """
    parser = Parser(text)
    compute = parser.sum(0)
    if parser.at < len(parser.tokens):
        raise Unreadable(f"{text!r} goes on after an expression")
    decimal = re.fullmatch(r"-?\s*(\d*)\.(\d+)", text.strip())
    places = None if decimal is None else (len(decimal[2]), len((decimal[1] + decimal[2]).lstrip("0")))
    return Expression(compute, frozenset(parser.names), text, places, frozenset(parser.names & parser.whole))


def equal(one: Expression, other: Expression) -> bool:
    """Return whether two expressions have the same value everywhere, whole numbers where one needs them."""
    names, whole = sorted(one.names | other.names), one.whole | other.whole
    if not names:
        return equal_numbers(one, other)
    found = 0
    for point in points(names, whole):
        left, right = one.at(point), other.at(point)
        if any(value < 0 for value in point.values()) and not (_is_real(left) and _is_real(right)):
            continue  # roots and logarithms of negative numbers have several values
        if left is None and right is None:
            continue
        if left is None or right is None:
            if all(value > 0 for value in point.values()) and all(point[name] > 2 for name in whole):
                return False
            continue
        if not _close(left, right) and not _differ_by_rounding(one, other, point):
            return False
        found += 1
    return found >= 3


def equal_numbers(one: Expression, other: Expression) -> bool:
    """Return whether two numbers are equal; a rounded decimal of 6 digits is equal to what has no finite one."""
    left, right = one.value, other.value
    if left is None or right is None:
        return False
    if _close(left, right) or _differ_by_rounding(one, other, {}):
        return True
    for decimal, exact, rounded, value in ((one, other, left, right), (other, one, right, left)):
        if decimal.places is not None and decimal.places[1] >= 6 and exact.places is None and _is_endless(value):
            with mpmath.workdps(DIGITS):
                error = abs(real_part(value) - real_part(rounded)) * mpmath.mpf(10) ** decimal.places[0]
                if mpmath.im(as_float(value)) == 0 and error <= mpmath.mpf("0.5000001"):
                    return True
    return False


def _is_real(value: Number | None) -> bool:
    return value is not None and (isinstance(value, Fraction) or mpmath.im(value) == 0)


def _is_endless(value: Number) -> bool:
    if not isinstance(value, Fraction):
        return True
    below = value.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    return below != 1


def _close(left: Number, right: Number) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    with mpmath.workdps(DIGITS):
        left, right = as_float(left), as_float(right)
        if mpmath.isinf(left) or mpmath.isinf(right):
            return bool(left == right)
        return bool(abs(left - right) <= mpmath.mpf(10) ** -45 * max(abs(left), abs(right)))


def _differ_by_rounding(one: Expression, other: Expression, point: Mapping[str, Number]) -> bool:
    r"""Return whether a difference is an error of rounding, which more digits make smaller: ``\sin \pi`` and 0."""
    errors = []
    for digits in (DIGITS, 2 * DIGITS):
        left, right = one.at(point, digits), other.at(point, digits)
        if left is None or right is None or (isinstance(left, Fraction) and isinstance(right, Fraction)):
            return False
        with mpmath.workdps(digits):
            errors.append(abs(as_float(left) - as_float(right)))
        if not errors[0] < SMALLEST:
            return False
    return bool(errors[1] < errors[0] * SMALLEST)


def points(names: list[str], whole: frozenset[str] = frozenset()) -> list[dict[str, Fraction]]:
    """Return points with values of both signs and several sizes, the same ones for the same names.

    Those of ``whole`` are positive whole numbers.
    """
    points = []
    for number in range(10):
        point = {}
        for index, name in enumerate(names):
            seed = (number + 1) * 7919 + (index + 1) * 104729 + sum(map(ord, name)) * 31
            value = Fraction(seed % 9973 + 17, 1777 + (seed * 13) % 2003)
            if name in whole:
                point[name] = Fraction(WHOLE[(number + 3 * index) % len(WHOLE)])
                continue
            point[name] = value if number < 6 or (number + index) % 2 else -value
        points.append(point)
    return points
