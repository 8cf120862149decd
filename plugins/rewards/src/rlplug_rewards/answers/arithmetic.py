"""Arithmetic of answers: exact with fractions, otherwise with 60 digits, and refused where it would be too large."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final

import mpmath

DIGITS: Final = 60
MOST_BITS: Final = 1 << 17
"""Largest exact number, in bits."""
Number = Any
"""A ``Fraction``, or a number of mpmath."""


def as_float(value: Number) -> Any:
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def real_part(value: Number) -> Any:
    return mpmath.re(as_float(value))


def _both(operation: Callable[[Any, Any], Any]) -> Callable[[Number, Number], Number]:
    def compute(left: Number, right: Number) -> Number:
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return operation(left, right)
        return operation(as_float(left), as_float(right))

    return compute


add, subtract, multiply, divide = (_both(each) for each in (operator.add, operator.sub, operator.mul, operator.truediv))


def power(base: Number, exponent: Number) -> Number:
    """Return a power, exactly where that is a fraction of a bearable size.

    Raises:
        OverflowError: It is larger than can be compared.
    """
    if isinstance(exponent, Fraction) and isinstance(base, Fraction):
        if exponent.denominator == 1:
            size = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent.numerator)
            if size <= MOST_BITS or abs(base) in (0, 1):
                return base ** int(exponent) if abs(base) > 1 or exponent > 0 or base else 1 / base
            raise OverflowError
        if base >= 0 and exponent.denominator < 64:
            above, below = (_root(each, exponent.denominator) for each in (base.numerator, base.denominator))
            if above is not None and below is not None:
                return power(Fraction(above, below), Fraction(exponent.numerator))
    base, exponent = as_float(base), as_float(exponent)
    if abs(exponent) > 10**6 or (base and abs(exponent * mpmath.log(base)) > 10**7):
        raise OverflowError
    return mpmath.power(base, exponent)


def _root(number: int, degree: int) -> int | None:
    if number < 2 or number.bit_length() > 4096:
        return number if number < 2 else None
    guess = round(number ** (1 / degree)) if number.bit_length() < 900 else math.isqrt(number) if degree == 2 else 0
    found: int | None = next(
        (each for each in (guess - 1, guess, guess + 1) if each >= 0 and each**degree == number), None
    )
    return found


def root(value: Number, degree: Number) -> Number:
    """Return the real root of a number where there is one, as readers of ``\\sqrt[3]{-8}`` expect."""
    if (
        isinstance(value, Fraction)
        and value < 0
        and isinstance(degree, Fraction)
        and degree.denominator == 1
        and degree % 2
    ):
        return -root(-value, degree)
    return power(value, divide(Fraction(1), degree))


def factorial(value: Number) -> Number:
    if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= 10**4:
        return Fraction(math.factorial(int(value)))
    if abs(as_float(value)) > 10**5:
        raise OverflowError
    return mpmath.gamma(as_float(value) + 1)


def binomial(above: Number, below: Number) -> Number:
    if all(isinstance(each, Fraction) and each.denominator == 1 and 0 <= each <= 10**4 for each in (above, below)):
        return Fraction(math.comb(int(above), int(below)))
    if max(abs(as_float(above)), abs(as_float(below))) > 10**5:
        raise OverflowError
    return mpmath.binomial(as_float(above), as_float(below))


def permutations(above: Number, below: Number) -> Number:
    """Return how many ordered choices of ``below`` from ``above`` there are, both whole numbers."""
    number, chosen = whole(above, 2000), whole(below, 2000)
    return Fraction(math.perm(number, chosen))


def double_factorial(value: Number) -> Number:
    """Return the product of a whole number and every second one below it."""
    return Fraction(math.prod(range(whole(value, 2000), 0, -2)))


def greatest_divisor(*values: Number) -> Number:
    return Fraction(math.gcd(*map(whole, values)))


def least_multiple(*values: Number) -> Number:
    return Fraction(math.lcm(*map(whole, values)))


def modulo(value: Number, modulus: Number) -> Number:
    """Return the remainder, which is at least 0 and less than the modulus."""
    if not isinstance(value, Fraction) or not isinstance(modulus, Fraction) or modulus <= 0:
        raise ValueError(f"{value} has no remainder for {modulus}")
    return value % modulus


def largest(*values: Number) -> Number:
    return _chosen(max, values)


def least(*values: Number) -> Number:
    return _chosen(min, values)


def _chosen(choose: Callable[..., Number], values: tuple[Number, ...]) -> Number:
    if any(mpmath.im(as_float(value)) for value in values):
        raise ValueError("complex numbers have no order")
    return choose(values, key=real_part)


def whole(value: Number, most: int | None = None) -> int:
    """Return a whole number, which is at least 0 and at most ``most`` where that is given.

    Raises:
        ValueError: It is none.
        OverflowError: It is larger.
    """
    if not isinstance(value, Fraction) or value.denominator != 1 or (most is not None and value < 0):
        raise ValueError(f"{value} is no whole number")
    if most is not None and value > most:
        raise OverflowError
    return int(value)


def applied(function: Callable[[Any], Any], value: Number) -> Number:
    if abs(as_float(value)) > 10**9 and function is not mpmath.log:
        raise OverflowError
    return function(as_float(value))


def determinant(rows: list[list[Number]]) -> Number:
    """Return the determinant of a square matrix, along its first row."""
    if len(rows) == 1:
        return rows[0][0]
    total: Number = Fraction(0)
    for column, entry in enumerate(rows[0]):
        minor = determinant([row[:column] + row[column + 1 :] for row in rows[1:]])
        total = (subtract if column % 2 else add)(total, multiply(entry, minor))
    return total


def rounded(rounding: Callable[[Any], int], value: Number) -> Number:
    """Return the integer next to a number; one that is an integer but for errors of the last digits is that integer."""
    if isinstance(value, Fraction):
        return Fraction(rounding(value))
    nearest = mpmath.nint(value)
    if mpmath.im(value) == 0 and abs(value - nearest) < mpmath.mpf(10) ** -45 * max(1, abs(value)):
        return Fraction(int(mpmath.re(nearest)))
    return Fraction(rounding(value))
