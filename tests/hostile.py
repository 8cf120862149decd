"""Values that code from outside may hand over: of wrong types, huge, half a character, or with methods that raise."""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import numpy
import torch
from hypothesis import strategies as st

SURROGATE = "a\ud800b"


class Leaving:
    """Every question about it ends the thread, or tries to."""

    def __repr__(self) -> str:
        sys.exit(0)

    __str__ = __float__ = __len__ = __iter__ = __bool__ = __index__ = __repr__  # type: ignore[assignment]


class RaisingRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __float__(self) -> float:
        raise MemoryError("no number")


class Unprintable(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        raise KeyError("no text")


class HugeText(Exception):
    def __str__(self) -> str:
        return "x\ud800" * 5_000_000


class Slow:
    """A number that takes longer than any deadline of a test."""

    def __float__(self) -> float:
        time.sleep(30)
        return 1.0


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


ATOMS: list[Any] = [
    *(None, True, "", "1.0", "text", SURROGATE, "\udfff", "\x1b[2J", b"bytes", bytearray(2), 0, -1, 10**400, 1 << 70),
    *(0.5, -0.0, float("nan"), float("inf"), -float("inf"), 1e39, 3.4e38, 1e16, 1j, ..., NotImplemented, object, len),
    *((), [], {}, set(), frozenset({1}), {1: 2}, {SURROGATE: 1}, {"": ""}, {(1, 2): 3}, [None], [[1.0]], deep(2000)),
    *(numpy.float32(1), numpy.array([1.0, 2.0]), numpy.array("a"), torch.tensor(1.0), torch.zeros(3), torch.tensor([])),
    *(Leaving(), RaisingRepr(), itertools.repeat(1.0), (_ for _ in ()), "x" * 10_000_000, ValueError("a value")),
]

values = st.sampled_from(ATOMS) | st.recursive(
    st.sampled_from(ATOMS[:27]) | st.text(max_size=5) | st.floats() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
"""Anything that Python code may return."""

characters = st.characters(exclude_categories=())
"""All characters, halves of surrogate pairs too."""

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(characters, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(characters, max_size=4), inner, max_size=3),
    max_leaves=8,
)
"""What Python's ``json`` reads and writes: NaN and halves of surrogate pairs included."""


@st.composite
def mutated(draw: st.DrawFn, value: Any) -> Any:
    """Return JSON with one to three of its parts removed or replaced by anything else of JSON."""
    for _ in range(draw(st.integers(1, 3))):
        value = _mutated_once(draw, value)
    return value


def _mutated_once(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, dict | list) and value and draw(st.integers(0, 5)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw(st.sampled_from(keys))
        copied = value.copy()
        if draw(st.integers(0, 3)):
            copied[key] = _mutated_once(draw, value[key])
        else:
            del copied[key]
        return copied
    return draw(json_values | st.sampled_from([-1, 10**9, -5.0, 2.5, float("nan"), "0", 1 << 80, [[1], [2, 3]]]))
