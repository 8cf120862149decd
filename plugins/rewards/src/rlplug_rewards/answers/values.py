"""What an answer means: a quantity, several values, a region of the real line, a relation, a grid, a time or words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from rlplug_rewards.answers.expressions import Expression
from rlplug_rewards.answers.units import Unit


@dataclass(frozen=True)
class Quantity:
    """A number or expression, with the unit or per cent that it names."""

    expression: Expression
    unit: Unit | None = None
    is_percent: bool = False


@dataclass(frozen=True)
class Items:
    """Several values.

    Attributes:
        brackets: Empty for a plain list, else such as ``()``, ``[]``, ``⦃⦄``, ``⟨⟩``, and ``:`` for a ratio.
    """

    brackets: str
    parts: tuple[Value, ...]


@dataclass(frozen=True)
class Span:
    """An interval with real ends, or a single number."""

    low: Expression
    high: Expression
    has_low: bool
    has_high: bool


@dataclass(frozen=True)
class Region:
    """Intervals in ascending order that do not touch; none for the empty set.

    Attributes:
        name: The symbol, such as ``x`` in ``x > 2``, if one is named.
    """

    spans: tuple[Span, ...]
    name: str = ""


@dataclass(frozen=True)
class Relation:
    """An equation or inequality: ``sign`` is one of ``=``, ``<``, ``<=`` and ``!=``.

    Attributes:
        label: What an equation names, where its left side is a name such as ``x``, ``f(x)`` or ``AB``; else empty.
        right: The value of what is named, else the right side.
    """

    sign: str
    label: str
    left: Expression | None
    right: Value


@dataclass(frozen=True)
class Grid:
    """A matrix, or the rows of a function by cases."""

    rows: tuple[tuple[Value, ...], ...]
    is_cases: bool = False


@dataclass(frozen=True)
class Clock:
    """A time of day in seconds. ``is_known`` is false where it may be before or after noon."""

    seconds: int
    is_known: bool
    ratio: Items | None = None


@dataclass(frozen=True)
class Words:
    """Words, without case, articles and punctuation; or a notation that is compared literally.

    Attributes:
        product: The product that a few letters in a row may be.
    """

    text: str
    is_literal: bool = False
    product: Expression | None = None


@dataclass(frozen=True)
class Count:
    """A notation such as ``C(10, 3)``: a number where it is compared with one, else what it also may be.

    Attributes:
        number: The number of choices.
        otherwise: Its other meaning, such as a point.
    """

    number: Quantity
    otherwise: Value | None


Value: TypeAlias = Quantity | Items | Region | Relation | Grid | Clock | Words | Count
NOTHING: Final = Region(())
