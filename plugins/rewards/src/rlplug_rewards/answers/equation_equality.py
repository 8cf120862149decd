"""Whether two equations or inequalities have the same solutions.

Their differences of both sides are multiples of each other. In equations the factor may also be a product of powers of
symbols where neither equation has a solution with such a symbol at 0: ``xy = 1`` is ``y = 1/x``, and ``xy = x`` is not
``y = 1``.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Final

import mpmath

from rlplug_rewards.answers.arithmetic import DIGITS, Number, as_float, divide, multiply, power, real_part, subtract
from rlplug_rewards.answers.expressions import Expression, equal, points

LARGEST_EXPONENT: Final = 8
PARTS: Final = 6
"""Exponents are multiples of 1/6."""


def are_same_equations(a: Expression, b: Expression, c: Expression, d: Expression, sign: str) -> bool:
    """Return whether ``a = b`` has the solutions of ``c = d``, or so for another sign than ``=``."""
    one, other = _difference(a, b), _difference(c, d)
    if one.names != other.names:
        return False
    names = one.names
    quotient = Expression(
        lambda point: divide(one.compute(point), other.compute(point)), names, "", whole=one.whole | other.whole
    )
    at = next((point for point in points(sorted(names)) if quotient.at(point) is not None), None)
    if at is None or not (first := quotient.at(at)):
        return False
    if sign in ("<", "<="):
        with mpmath.workdps(DIGITS):
            return bool(real_part(first) > 0) and equal(quotient, _constant(first))
    if equal(quotient, _constant(first)):
        return True
    exponents = {name: _exponent(quotient, at, name) for name in names}
    factor = Expression(lambda point: _monomial(point, exponents), names, "")
    scale = factor.at(at)
    if not scale or not equal(quotient, _times(factor, divide(first, scale))):
        return False
    zeros = [name for name, exponent in exponents.items() if exponent]
    return all(_has_no_solution(side, name) for side in (one, other) for name in zeros)


def _difference(left: Expression, right: Expression) -> Expression:
    return Expression(
        lambda point: subtract(left.compute(point), right.compute(point)),
        left.names | right.names,
        "",
        whole=left.whole | right.whole,
    )


def _constant(value: Number) -> Expression:
    return Expression(lambda _: value, frozenset(), "")


def _times(expression: Expression, factor: Number) -> Expression:
    return Expression(lambda point: multiply(expression.compute(point), factor), expression.names, "")


def _monomial(point: Mapping[str, Number], exponents: dict[str, Fraction]) -> Number:
    value: Number = Fraction(1)
    for name, exponent in exponents.items():
        value = multiply(value, power(point[name], exponent))
    return value


def _exponent(quotient: Expression, at: dict[str, Fraction], name: str) -> Fraction:
    """Return the power of a symbol in a product of powers, 0 where it is none."""
    first, doubled = quotient.at(at), quotient.at({**at, name: 2 * at[name]})
    if not first or not doubled:
        return Fraction(0)
    with mpmath.workdps(DIGITS):
        exponent = mpmath.log(abs(as_float(divide(doubled, first))), 2) * PARTS
        if abs(exponent) > LARGEST_EXPONENT * PARTS or abs(exponent - mpmath.nint(exponent)) > 1e-9:
            return Fraction(0)
        return Fraction(int(mpmath.nint(exponent)), PARTS)


def _has_no_solution(side: Expression, name: str) -> bool:
    """Return whether a side that is 0 in all solutions is a constant other than 0, or undefined, with a symbol at 0."""
    rest = [{**point, name: Fraction(0)} for point in points(sorted(side.names))]
    values = [value for point in rest if (value := side.at(point)) is not None]
    if not values:
        return True
    restricted = Expression(lambda point: side.compute({**point, name: Fraction(0)}), side.names, "")
    return bool(values[0]) and equal(restricted, _constant(values[0]))
