r"""Values of sums and products over a range of integers, such as ``\sum_{k=1}^{10} k^2``, term by term.

The work is bounded before it begins: by the terms, fewer where a term is long, has free symbols or is a sum itself; and
as it goes on, by the bits of the partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Final

from rlplug_rewards.answers.arithmetic import Number, add, multiply
from rlplug_rewards.answers.tokens import FUNCTIONS

MOST_TERMS: Final = 10_000
MOST_STEPS: Final = 100_000
"""Most steps of all terms: a token is one, and those of ``STEPS`` are more."""
STEPS: Final = {"!": 50, "\\binom": 50, "\\permutations": 50, "^": 20, "**": 20} | {
    token: 10 for name in FUNCTIONS for token in (name, f"\\{name}")
}
MOST_BITS: Final = 1 << 24
"""Most bits of all partial sums together."""
POINTS: Final = 10
"""Points at which a sum with symbols is evaluated."""


def most_terms(tokens: list[str], has_names: bool, is_nested: bool) -> int:
    """Return how many terms a sum may have.

    Args:
        tokens: Tokens of its term.
        has_names: Whether the sum has free symbols, so that it is evaluated at many points.
        is_nested: Whether it is a term of another sum, or has one as its term.
    """
    steps = sum(STEPS.get(token, 1) for token in tokens)
    most = min(MOST_TERMS, MOST_STEPS // max(1, steps)) // (POINTS if has_names else 1)
    return math.isqrt(most) if is_nested else most


def series(is_sum: bool, low: Number, high: Number, most: int, term: Callable[[Fraction], Number]) -> Number:
    """Return the sum or product of the terms at all integers from ``low`` to ``high``.

    Raises:
        ValueError: A bound is no integer, or they are in descending order.
        OverflowError: There are more than ``most`` terms, or these are too large.
    """
    if not all(isinstance(bound, Fraction) and bound.denominator == 1 for bound in (low, high)) or high < low - 1:
        raise ValueError(f"{low} to {high} is no range of integers")
    if high - low >= most:
        raise OverflowError
    combine = add if is_sum else multiply
    total: Number = Fraction(0 if is_sum else 1)
    bits = 0
    for index in range(int(low), int(high) + 1):
        total = combine(total, term(Fraction(index)))
        if isinstance(total, Fraction):
            bits += total.numerator.bit_length() + total.denominator.bit_length()
        if bits > MOST_BITS:
            raise OverflowError
    return total
