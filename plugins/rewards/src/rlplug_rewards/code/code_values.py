"""Values that cross between the process that tests and the process of the code: trees of literals.

Atoms are themselves; everything else is a tuple of its kind and its parts, so that no class of the code is ever
loaded here. A subclass of a number, text or container of Python is its value. It uses the standard library alone.
"""

from __future__ import annotations

import ast
import collections
import datetime
import decimal
import fractions
import math
import types
from collections.abc import Callable
from typing import Any

MOST_LEVELS = 60
MOST_FIELDS = 200
ITERATORS: tuple[type[Any], ...] = (
    types.GeneratorType,
    map,
    filter,
    zip,
    enumerate,
    reversed,
    type(iter([])),
    type(iter({})),
    type(iter(())),
    type(iter(set())),
)
VIEWS: dict[str, Any] = {"keys": type({}.keys()), "values": type({}.values()), "items": type({}.items())}
ATOMS: tuple[Any, ...] = (int, str, bytes)
PLAIN: tuple[Any, ...] = (list, tuple, set, frozenset, collections.deque)
DATES: dict[str, Any] = {"date": datetime.date, "datetime": datetime.datetime, "time": datetime.time}


def encode(value: Any, other: Callable[[Any], tuple[Any, ...]], levels: int = MOST_LEVELS) -> Any:
    """Return a value as a tree of literals.

    Args:
        value: Any object.
        other: Returns what stands for an object that is no data.
        levels: Levels of containers that are still allowed.
    """
    if value is None or isinstance(value, bool):
        return value
    for atom in ATOMS:
        if isinstance(value, atom):
            return value if type(value) is atom else atom.__new__(atom, value)
    if isinstance(value, float):
        number = float.__add__(value, 0.0)
        return number if math.isfinite(number) else ("float", repr(number))
    if levels == 0:
        return other(value)

    def inner(each: Any) -> Any:
        return encode(each, other, levels - 1)

    if isinstance(value, tuple) and isinstance(fields := getattr(type(value), "_fields", None), tuple):
        return ("namedtuple", type(value).__name__, list(fields), [inner(each) for each in tuple.__iter__(value)])
    if isinstance(value, dict):
        kind = next(
            (
                each
                for each in (collections.Counter, collections.OrderedDict, collections.defaultdict)
                if isinstance(value, each)
            ),
            dict,
        )
        return (kind.__name__, [(inner(key), inner(each)) for key, each in dict.items(value)])
    for kind in PLAIN:
        if isinstance(value, kind):
            return (kind.__name__, [inner(each) for each in kind.__iter__(value)])
    return _scalar(value) or _view(value, inner) or other(value)


def _scalar(value: Any) -> tuple[Any, ...] | None:
    if isinstance(value, complex):
        return ("complex", repr(value.real), repr(value.imag))
    if isinstance(value, range):
        return ("range", value.start, value.stop, value.step)
    if isinstance(value, bytearray):
        return ("bytearray", bytes(value))
    if isinstance(value, fractions.Fraction):
        return ("Fraction", value.numerator, value.denominator)
    if isinstance(value, decimal.Decimal):
        return ("Decimal", decimal.Decimal.__str__(value))
    if isinstance(value, datetime.timedelta):
        return ("timedelta", value.days, value.seconds, value.microseconds)
    for name in ("datetime", "date", "time"):
        if isinstance(value, DATES[name]):
            return (name, value.isoformat())
    return None


def _view(value: Any, inner: Callable[[Any], Any]) -> tuple[Any, ...] | None:
    for name, kind in VIEWS.items():
        if isinstance(value, kind):
            pairs = name == "items"
            return (name, [(inner(each[0]), inner(each[1])) if pairs else inner(each) for each in value])
    return None


def decode(tree: Any, other: Callable[[tuple[Any, ...]], Any]) -> Any:
    """Return the value of a tree.

    Args:
        tree: What :func:`encode` returned.
        other: Returns what a tuple of another kind stands for.

    Raises:
        ValueError: It is malformed.
    """
    if not isinstance(tree, tuple):
        return tree
    if not tree or not isinstance(tree[0], str):
        raise ValueError("a value without a kind")
    kind, *parts = tree
    if kind in ("dict", "Counter", "OrderedDict", "defaultdict", "items"):
        pairs = {decode(key, other): decode(each, other) for key, each in parts[0]}
        made: dict[str, Callable[[], Any]] = {
            "dict": lambda: pairs,
            "Counter": lambda: collections.Counter(pairs),
            "OrderedDict": lambda: collections.OrderedDict(pairs),
            "defaultdict": lambda: collections.defaultdict(None, pairs),
            "items": lambda: pairs.items(),
        }
        return made[kind]()
    if kind in ("list", "tuple", "set", "frozenset", "deque", "keys", "values"):
        values = [decode(each, other) for each in parts[0]]
        if kind in ("keys", "values"):
            return dict.fromkeys(values).keys() if kind == "keys" else dict(enumerate(values)).values()
        return {each.__name__: each for each in PLAIN}[kind](values)
    if kind == "namedtuple":
        name, fields, inner = parts
        if len(fields) > MOST_FIELDS:
            raise ValueError("a named tuple with too many fields")
        made_class = collections.namedtuple(name, fields)  # type: ignore[misc]
        return made_class(*(decode(each, other) for each in inner))
    return _decode_scalar(kind, parts) if kind in SCALARS else other(tree)


SCALARS: dict[str, Callable[..., Any]] = {
    "float": float,
    "complex": lambda real, imaginary: complex(float(real), float(imaginary)),
    "range": range,
    "bytearray": bytearray,
    "Fraction": fractions.Fraction,
    "Decimal": decimal.Decimal,
    "timedelta": datetime.timedelta,
    **{name: kind.fromisoformat for name, kind in DATES.items()},
}


def _decode_scalar(kind: str, parts: list[Any]) -> Any:
    return SCALARS[kind](*parts)


def update(old: Any, new: Any) -> None:
    """Make a mutable container equal to another of its kind, in place, and so the containers in it."""
    if type(old) is not type(new):
        return
    if isinstance(old, list | collections.deque):
        if len(old) == len(new):
            for index, (left, right) in enumerate(zip(list(old), new, strict=True)):
                if _is_mutable(left) and type(left) is type(right):
                    update(left, right)
                else:
                    old[index] = right
        else:
            old.clear()
            old.extend(new)
    elif isinstance(old, dict):
        kept = {key: each for key, each in old.items() if key in new}
        old.clear()
        for key, each in new.items():
            if key in kept and _is_mutable(kept[key]) and type(kept[key]) is type(each):
                update(kept[key], each)
                old[key] = kept[key]
            else:
                old[key] = each
    elif isinstance(old, set):
        old.clear()
        old |= new
    elif isinstance(old, bytearray):
        old[:] = new


def _is_mutable(value: Any) -> bool:
    return isinstance(value, list | dict | set | bytearray | collections.deque)


def has_mutable(value: Any) -> bool:
    """Return whether a call may change a value that it gets."""
    return _is_mutable(value) or (isinstance(value, tuple) and any(has_mutable(each) for each in value))


def write(tree: Any) -> bytes:
    """Return a tree as a line."""
    return f"{tree!r}\n".encode(errors="backslashreplace")


def read(line: bytes | str) -> Any:
    """Return the tree of a line.

    Raises:
        ValueError: It is none.
    """
    try:
        return ast.literal_eval(line.decode() if isinstance(line, bytes) else line)
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError("a line that is no literal") from error
