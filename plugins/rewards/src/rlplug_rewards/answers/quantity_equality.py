"""Whether two quantities are the same: per cent, units, residues, angles, and constants of integrals."""

from __future__ import annotations

from fractions import Fraction
from typing import Final

import mpmath

from rlplug_rewards.answers.arithmetic import multiply, subtract
from rlplug_rewards.answers.expressions import Expression, equal, read_expression
from rlplug_rewards.answers.units import same_kind
from rlplug_rewards.answers.values import Quantity

WHOLE_NUMBERS: Final = frozenset("kmnl")
"""Letters of the whole number in a family of angles."""
CONSTANTS: Final = frozenset("CcKkDA")
"""Letters of the constant of an integral."""
HUNDREDTH: Final = read_expression("1/100")


def same_quantities(one: Quantity, other: Quantity) -> bool:
    if one.is_percent != other.is_percent:
        percent, plain = (one, other) if one.is_percent else (other, one)
        if plain.unit is not None:
            return False
        value = plain.expression.value
        is_share = not (isinstance(value, Fraction) and value.denominator == 1 and abs(value) > 1)
        if is_share and equal(product(percent.expression, HUNDREDTH), plain.expression):
            return True
        return _is_above_one(plain.expression) and equal(percent.expression, plain.expression)
    if not same_kind(one.unit, other.unit):
        return _is_angle(one, other)
    if (one.unit and one.unit.modulus) or (other.unit and other.unit.modulus):
        return _are_residues(one, other)
    if one.unit is not None and other.unit is not None and one.unit.dimension and one.unit.factor != other.unit.factor:
        return equal(_scaled(one), _scaled(other))
    if equal(one.expression, other.expression) or _is_angle(one, other):
        return True
    return _are_antiderivatives(one.expression, other.expression) or _are_families(one.expression, other.expression)


def _are_residues(one: Quantity, other: Quantity) -> bool:
    r"""Return whether two residues are the same, or a number is one.

    A number is the least residue that is not negative, or the number of the residue where it is less than the modulus:
    ``17 \pmod 5`` is 2, and ``-1 \pmod 7`` is -1 and 6.
    """
    left, right = one.expression.value, other.expression.value
    if not isinstance(left, Fraction) or not isinstance(right, Fraction):
        return equal(one.expression, other.expression)
    if one.unit is not None and other.unit is not None:
        return same_kind(one.unit, other.unit) and (left - right) % (one.unit.modulus or 1) == 0
    residue, number, unit = (left, right, one.unit) if one.unit is not None else (right, left, other.unit)
    assert unit is not None
    assert unit.modulus is not None
    return number == residue % unit.modulus or (number == residue and abs(number) < unit.modulus)


def _are_families(one: Expression, other: Expression) -> bool:
    r"""Return whether two are the same angles with another letter for the whole number: ``k\pi``, ``n\pi``."""
    if one.names == other.names or len(one.names) != 1 or len(other.names) != 1:
        return False
    (old,), (new,) = one.names, other.names
    if not {old, new} <= WHOLE_NUMBERS or r"\pi" not in one.text or r"\pi" not in other.text:
        return False
    return equal(one.renamed(old, new), other)


def _are_antiderivatives(one: Expression, other: Expression) -> bool:
    """Return whether two expressions differ in the letter of their added constant alone: ``x^2 + C``, ``x^2 + K``."""
    first, second = one.names - other.names, other.names - one.names
    if len(first) != 1 or len(second) != 1 or not one.names & other.names or not first | second <= CONSTANTS:
        return False
    (old,), (new,) = first, second
    renamed = one.renamed(old, new)
    is_added = equal(
        Expression(lambda point: subtract(other.compute(point), point[new]), other.names, ""),
        Expression(lambda point: other.compute({**point, new: Fraction(0)}), other.names, ""),
    )
    return is_added and equal(renamed, other)


def _is_above_one(expression: Expression) -> bool:
    value = expression.value
    if value is None:
        return bool(expression.names)
    with mpmath.workdps(60):
        return bool(abs(value) > 1)


def _scaled(quantity: Quantity) -> Expression:
    assert quantity.unit is not None
    factor = quantity.unit.factor
    return product(quantity.expression, Expression(lambda _: factor, frozenset(), str(factor)))


def product(one: Expression, other: Expression) -> Expression:
    return Expression(
        lambda point: multiply(one.compute(point), other.compute(point)),
        one.names | other.names,
        f"{one.text}*{other.text}",
    )


def _is_angle(one: Quantity, other: Quantity) -> bool:
    """Return whether one is in degrees and the other the same angle in radians, as a multiple of pi."""
    for degrees, radians in ((one, other), (other, one)):
        if degrees.unit is None or degrees.unit.dimension != {("deg", 1)}:
            continue
        is_radian = radians.unit is None or radians.unit.dimension == {("rad", 1)}
        if is_radian and "pi" in radians.expression.text:
            return equal(product(degrees.expression, read_expression(r"\pi/180")), radians.expression)
    return False
