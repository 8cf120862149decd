"""``same``: whether two answers mean the same, by rules that do not depend on which of them is the reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from rlplug_rewards.answers.equation_equality import are_same_equations
from rlplug_rewards.answers.expressions import equal, equal_numbers
from rlplug_rewards.answers.notation import clean, compact
from rlplug_rewards.answers.quantity_equality import product, same_quantities
from rlplug_rewards.answers.reading import read
from rlplug_rewards.answers.regions import pair_as_region
from rlplug_rewards.answers.values import Clock, Count, Grid, Items, Quantity, Region, Relation, Span, Value, Words

SETS: Final = ("", "⦃⦄")
PRODUCTS: Final = ("abc", "xyz", "pqr", "mnk", "uvw", "rst")
FUNCTION_OF: Final = re.compile(r"([A-Za-z])\(([A-Za-z])\)")
COUNTED: Final = frozenset(["solution", "root", "zero"])
"""What there is none of where there is no solution."""


def same_answers(one: str, other: str) -> bool:
    """Return whether two answers, as they were written, mean the same."""
    left, right = clean(one), clean(other)
    if not left or not right:
        return False
    if compact(left) == compact(right):
        return True
    first, second = read(one), read(other)
    return first is not None and second is not None and same(first, second)


def same(one: Value, other: Value) -> bool:
    """Return whether two values are the same."""
    if isinstance(one, Relation) or isinstance(other, Relation):
        return _same_relations(one, other)
    for left, right in ((one, other), (other, one)):
        if isinstance(left, Items) and len(left.parts) == 1 and not isinstance(right, Items | Region):
            return same(left.parts[0], right)
        if isinstance(left, Items) and not isinstance(right, Items) and _is_one_in_two_notations(left):
            return same(left.parts[0], right)
        if isinstance(left, Items) and len(left.parts) == 1 and isinstance(left.parts[0], Items):  # {(1, 2)}
            return same(left.parts[0], right)
    if isinstance(one, Count) or isinstance(other, Count):
        return _same_counts(one, other)
    if isinstance(one, Clock) or isinstance(other, Clock):
        return _same_clocks(one, other)
    if isinstance(one, Region) or isinstance(other, Region):
        if _is_none_of_them(one, other) or _is_none_of_them(other, one):
            return True
        left_region, right_region = _as_region(one), _as_region(other)
        return left_region is not None and right_region is not None and _same_regions(left_region, right_region)
    if isinstance(one, Grid) or isinstance(other, Grid):
        return _same_grids(one, other)
    if isinstance(one, Items) or isinstance(other, Items):
        return _same_items(one, other)
    if isinstance(one, Quantity) and isinstance(other, Quantity):
        return same_quantities(one, other)
    if isinstance(one, Words) and isinstance(other, Words):
        return (one.text, one.is_literal) == (other.text, other.is_literal) or _same_products(one.text, other.text)
    for left, right in ((one, other), (other, one)):
        if isinstance(left, Words) and isinstance(right, Quantity) and left.product is not None and right.unit is None:
            return equal(left.product, right.expression)
    return False


# ---- quantities -----------------------------------------------------------------------------------------------------


def _same_products(one: str, other: str) -> bool:
    """Return whether letters in a row are one product: ``xy`` is ``yx``, and ``on`` is not ``no``."""
    return one.isalpha() and sorted(one) == sorted(other) and any(set(one) <= set(letters) for letters in PRODUCTS)


def _same_counts(one: Value, other: Value) -> bool:
    """Compare notations of which at least one is a count where the other is a number."""
    for left, right in ((one, other), (other, one)):
        if isinstance(left, Count) and isinstance(right, Quantity) and not right.expression.names:
            return same_quantities(left.number, right)
    first, second = (each.otherwise if isinstance(each, Count) else each for each in (one, other))
    if isinstance(one, Count) and isinstance(other, Count) and not same_quantities(one.number, other.number):
        return False
    return first is not None and second is not None and same(first, second)


def _is_none_of_them(region: Value, quantity: Value) -> bool:
    """Return whether one is no solution, and the other ``0 solutions``."""
    if not isinstance(region, Region) or region.spans or not isinstance(quantity, Quantity) or quantity.unit is None:
        return False
    return quantity.expression.value == 0 and bool(quantity.unit.words & COUNTED)


# ---- several values -------------------------------------------------------------------------------------------------


def _same_items(one: Value, other: Value) -> bool:
    if not isinstance(one, Items) or not isinstance(other, Items):
        items, single = (one, other) if isinstance(one, Items) else (other, one)
        assert isinstance(items, Items)
        return items.brackets == ":" and isinstance(single, Quantity) and _is_ratio(items, single)
    if one.brackets == ":" or other.brackets == ":":
        return one.brackets == other.brackets and _same_ratios(one, other)
    left, right = _labelled(one), _labelled(other)
    if left is not None and right is not None:
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if left is not None or right is not None:
        named, plain = (left, other) if left is not None else (right, one)
        assert named is not None
        if any(isinstance(part, Relation) for part in plain.parts):
            return False
        return _in_order([named[name] for name in sorted(named)], plain.parts)
    parts = [[_unlabelled(part) for part in items.parts] for items in (one, other)]
    if one.brackets in SETS and other.brackets in SETS:
        are_sets = "⦃⦄" in (one.brackets, other.brackets)
        left_parts, right_parts = (_distinct(each) if are_sets else each for each in parts)
        return _in_any_order(left_parts, right_parts)
    if "⦃⦄" in (one.brackets, other.brackets):
        return False
    if "[]" in (one.brackets, other.brackets) and one.brackets != other.brackets and len(one.parts) == 2:
        return False  # an interval
    return _in_order(*parts)


def _is_one_in_two_notations(items: Items) -> bool:
    """Return whether a list says one number several times, each time in another notation: ``3/4, or 75%``."""
    numbers = [part for part in items.parts if isinstance(part, Quantity)]
    notations = {(number.expression.text, number.is_percent, number.unit) for number in numbers}
    if items.brackets or not len(notations) == len(numbers) == len(items.parts):
        return False
    return all(same_quantities(numbers[0], number) for number in numbers[1:])


def _labelled(items: Items) -> dict[str, Value] | None:
    """Return values by name, where each has a name of its own: ``x = 3, y = 4``."""
    if not all(isinstance(part, Relation) and part.sign == "=" and part.label for part in items.parts):
        return None
    named = {part.label: part.right for part in items.parts if isinstance(part, Relation)}
    return named if len(named) == len(items.parts) and items.brackets in ("", "()", "⦃⦄") else None


def _unlabelled(value: Value) -> Value:
    return value.right if isinstance(value, Relation) and value.sign == "=" and value.label else value


def _in_order(one: Sequence[Value], other: Sequence[Value]) -> bool:
    return len(one) == len(other) and all(same(left, right) for left, right in zip(one, other, strict=True))


def _in_any_order(one: Sequence[Value], other: Sequence[Value], is_same: Callable[[Value, Value], bool] = same) -> bool:
    if len(one) != len(other):
        return False
    rest = list(other)
    for left in one:
        at = next((index for index, right in enumerate(rest) if is_same(left, right)), None)
        if at is None:
            return False
        del rest[at]
    return True


def _distinct(values: Sequence[Value]) -> list[Value]:
    found: list[Value] = []
    for value in values:
        if not any(same(value, other) for other in found):
            found.append(value)
    return found


def _same_ratios(one: Items, other: Items) -> bool:
    if len(one.parts) != len(other.parts):
        return False
    pairs = [
        (left.expression, right.expression)
        for left, right in zip(one.parts, other.parts, strict=True)
        if isinstance(left, Quantity) and isinstance(right, Quantity)
    ]
    first, second = pairs[0]
    return all(equal(product(left, second), product(right, first)) for left, right in pairs)


def _is_ratio(items: Items, single: Quantity) -> bool:
    if len(items.parts) != 2 or single.unit is not None or single.is_percent:
        return False
    above, below = items.parts
    assert isinstance(above, Quantity)
    assert isinstance(below, Quantity)
    return "/" in single.expression.text.replace(r"\frac", "/") and equal(
        product(single.expression, below.expression), above.expression
    )


def _same_grids(one: Value, other: Value) -> bool:
    if isinstance(one, Grid) and isinstance(other, Grid):
        if one.is_cases != other.is_cases or len(one.rows) != len(other.rows):
            return False
        if not one.is_cases:
            return all(_in_order(left, right) for left, right in zip(one.rows, other.rows, strict=True))
        left_rows, right_rows = ([Items("()", row) for row in grid.rows] for grid in (one, other))
        return _in_any_order(left_rows, right_rows, _same_cases)
    grid, items = (one, other) if isinstance(one, Grid) else (other, one)
    if not isinstance(grid, Grid) or not isinstance(items, Items) or items.brackets not in ("()", "⟨⟩", "[]"):
        return False
    cells = [cell for row in grid.rows for cell in row]
    return (len(grid.rows) == 1 or all(len(row) == 1 for row in grid.rows)) and _in_order(cells, items.parts)


def _same_cases(one: Value, other: Value) -> bool:
    assert isinstance(one, Items)
    assert isinstance(other, Items)
    return _in_order(one.parts, other.parts)


# ---- regions, times, relations --------------------------------------------------------------------------------------


def _as_region(value: Value) -> Region | None:
    if isinstance(value, Region):
        return value
    if isinstance(value, Items) and len(value.parts) == 2:
        low, high = value.parts
        if isinstance(low, Quantity) and isinstance(high, Quantity):
            return pair_as_region(value.brackets, low.expression, high.expression)
    return None


def _same_regions(one: Region, other: Region) -> bool:
    if one.name and other.name and one.name != other.name:
        return False
    return len(one.spans) == len(other.spans) and all(map(_same_spans, one.spans, other.spans))


def _same_spans(one: Span, other: Span) -> bool:
    return (
        (one.has_low, one.has_high) == (other.has_low, other.has_high)
        and equal_numbers(one.low, other.low)
        and equal_numbers(one.high, other.high)
    )


def _same_clocks(one: Value, other: Value) -> bool:
    if isinstance(one, Clock) and isinstance(other, Clock):
        period = 86400 if one.is_known == other.is_known else 43200
        return (one.seconds - other.seconds) % period == 0
    clock, value = (one, other) if isinstance(one, Clock) else (other, one)
    assert isinstance(clock, Clock)
    return clock.ratio is not None and same(clock.ratio, value)


def _same_relations(one: Value, other: Value) -> bool:
    if not isinstance(one, Relation) or not isinstance(other, Relation):
        relation, value = (one, other) if isinstance(one, Relation) else (other, one)
        assert isinstance(relation, Relation)
        if isinstance(value, Region) and value.name and relation.label and value.name != relation.label:
            return False
        return bool(relation.label) and relation.sign == "=" and same(relation.right, value)
    if one.sign != other.sign:
        return False
    other = _with_argument_of(one, other)
    if one.label and other.label and same(one.right, other.right):
        return one.label == other.label or not (_is_symbol(one.label) and _is_symbol(other.label))
    if (
        one.left is None
        or other.left is None
        or not isinstance(one.right, Quantity)
        or not isinstance(other.right, Quantity)
    ):
        return False
    if one.right.unit is not None or other.right.unit is not None:
        return False
    return are_same_equations(one.left, one.right.expression, other.left, other.right.expression, one.sign)


def _with_argument_of(one: Relation, other: Relation) -> Relation:
    """Return ``f(x) = 2x`` as ``f(n) = 2n`` where the other one names its argument so."""
    here, there = FUNCTION_OF.fullmatch(one.label), FUNCTION_OF.fullmatch(other.label)
    if here is None or there is None or here[1] != there[1] or here[2] == there[2]:
        return other
    if not isinstance(other.right, Quantity):
        return other
    if here[2] in other.right.expression.names:  # f(x) = 2n
        return replace(other, label="")
    expression = other.right.expression
    if there[2] in expression.names:
        expression = expression.renamed(there[2], here[2])
    return replace(other, label=one.label, right=replace(other.right, expression=expression))


def _is_symbol(label: str) -> bool:
    return re.fullmatch(r"[A-Za-z]|\\[a-z]+", label.strip()) is not None
