"""Checks of values from outside: what a policy, an environment, a reward or a data file gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from rlplug.errors import brief, describe
from rlplug.timeouts import CallError

MAX_DEPTH: Final = 64
"""Most levels of lists and objects in a value: copies, pickles and JSON of a deeper one run into Python's limit."""
MAX_DIGITS: Final = 4000
"""Most decimal digits of an integer; Python refuses to print more than 4,300."""
_TOO_LARGE: Final = 10**MAX_DIGITS
MAX_REWARD: Final = 1e15
"""Largest size of a reward. Algorithms sum the squares of a batch's rewards in float32, which ends at 3.4e38."""
SUMMARY_NAMES: Final = ("mean", "std", "min", "max", "error_share", "timed_out_threads")
"""Names of the metrics under ``reward/`` that describe all rewards together."""


def as_number(value: Any) -> float:
    """Return a number as a float, from any type that has ``__float__``: that of NumPy or a tensor of one element.

    Raises:
        CallError: It is no number (the text "1.0" is none), or not finite.
    """
    try:
        # float() itself would take the string "1.0"
        number = float(value) if hasattr(value, "__float__") else None
    except BaseException as error:  # noqa: BLE001 - its own code may raise anything, SystemExit too
        raise CallError(f"{brief(value)}, which is not a number: {describe(error)}") from None
    if number is None:
        raise CallError(f"{brief(value)}, which is not a number")
    if not math.isfinite(number):
        raise CallError(f"{number}, which is not finite")
    return number


def as_reward(value: Any) -> float:
    """Return a number that can train.

    Raises:
        CallError: It is no finite number, or too large for float32.
    """
    number = as_number(value)
    if abs(number) > MAX_REWARD:
        raise CallError(f"{number:g}, which is too large: float32 holds the squares of rewards up to {MAX_REWARD:g}")
    return number


def json_problem(value: Any, depth: int = MAX_DEPTH, is_json: bool = True) -> str | None:
    """Return what keeps a value from being JSON that a tokenizer and a chat template can take, or ``None``.

    Allowed are text without halves of surrogate pairs, integers of a printable size, finite numbers, true, false,
    null, and lists and dictionaries of these with text as keys.

    Args:
        depth: Levels of lists and dictionaries that are still allowed.
        is_json: False to look at text and levels alone: any other value is allowed.
    """
    if isinstance(value, str):
        return None if _is_encodable(value) else "half of a surrogate pair, which is no character"
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner = [*value, *value.values()]
        for key in value if is_json else ():
            if not isinstance(key, str):
                return f"the key {brief(key)}, which is not text"
    elif isinstance(value, list):
        inner = value
    elif is_json:
        return _atom_problem(value)
    if inner and depth == 0:
        return f"more than {MAX_DEPTH} levels of brackets"
    return next((problem for each in inner if (problem := json_problem(each, depth - 1, is_json))), None)


def _atom_problem(value: Any) -> str | None:
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int):
        return f"an integer of more than {MAX_DIGITS} digits" if abs(value) >= _TOO_LARGE else None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{value}, which is not a finite number"
    return f"a value of type {type(value).__name__}"


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
