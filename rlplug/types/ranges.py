"""Ranges of options, each on the field that holds the number: ``bucket_mib: Count = 1024``.

:func:`check_ranges` makes them hold for objects made in Python; the command line checks them before it makes any.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

from rlplug.errors import ConfigError, shorten


def reaches(value: Any, bound: float) -> Any:
    """Return whether a number, or each of an array, is at least ``bound``, but for what rounding may take from it."""
    return value >= bound - 1e-6 * max(1.0, abs(bound))


@dataclass(frozen=True)
class Range:
    """Range of a number from ``low`` up to ``high``, both included; of an open one the number must be above ``low``."""

    low: float
    high: float
    is_open: bool = False

    def check(self, key: str, value: Any) -> None:
        """Raise ``ConfigError`` for a number out of the range; what is no number passes."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        if not (isinstance(value, int) or math.isfinite(value)):
            raise ConfigError(f"{key} is {value}: give a finite number.")
        if value > self.high or value < self.low or (self.is_open and value == self.low):
            raise ConfigError(f"{key} is {shorten(value)}: give a number {self}.")

    def __str__(self) -> str:
        low = f"above {_text(self.low)} and" if self.is_open else f"from {_text(self.low)}"
        return f"{low} up to {_text(self.high)}"


def _text(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) and abs(number) < 10**15 else f"{number:g}"


DAY_S: Final = 86_400

Seed: TypeAlias = Annotated[int, Range(0, 2**32 - 1)]
Count: TypeAlias = Annotated[int, Range(1, 1_000_000)]
CountOrZero: TypeAlias = Annotated[int, Range(0, 1_000_000)]
Steps: TypeAlias = Annotated[int, Range(1, 10_000_000)]
Epochs: TypeAlias = Annotated[int, Range(1, 1000)]
Tokens: TypeAlias = Annotated[int, Range(1, 100_000_000)]
Rows: TypeAlias = Annotated[int, Range(1, 10**12)]
Seconds: TypeAlias = Annotated[float, Range(0.001, 30 * DAY_S)]
Share: TypeAlias = Annotated[float, Range(0, 1)]
PositiveShare: TypeAlias = Annotated[float, Range(0, 1, is_open=True)]
Positive: TypeAlias = Annotated[float, Range(1e-9, 1e6)]
RewardValue: TypeAlias = Annotated[float, Range(-1e9, 1e9)]


def check_ranges(made: Any, key: str = "") -> None:
    """Refuse an object whose numbers are out of the ranges of its fields, or of the arguments that its class takes.

    Call it at the end of ``__post_init__`` or ``__init__``; an argument's value is the attribute of its name.

    Args:
        made: The object.
        key: Key of the object in a configuration, such as ``model.limits``, for the message; by default its class.

    Raises:
        ConfigError: The message names the key, the value and the range.
    """
    for name, allowed in _ranges_of(type(made)).items():  # type: ignore[arg-type]  # a class is hashable
        allowed.check(f"{key or type(made).__name__}.{name}", getattr(made, name))


@functools.cache
def _ranges_of(kind: type) -> Mapping[str, Range]:
    ranges = {name: range_of(hint) for name, hint in hints_of(kind).items()}
    return {name: found for name, found in ranges.items() if found is not None}


def range_of(hint: Any) -> Range | None:
    """Return the range of a type hint such as ``Count`` or ``Count | None``."""
    found = [extra for part in (hint, *typing.get_args(hint)) for extra in getattr(part, "__metadata__", ())]
    return next((extra for extra in found if isinstance(extra, Range)), None)


def hints_of(made: Any) -> Mapping[str, Any]:
    """Return the types, with their ranges, of a dataclass's fields, or of the arguments of a class or function."""
    if dataclasses.is_dataclass(made):
        return typing.get_type_hints(made, include_extras=True)
    target: Callable[..., Any] = made.__init__ if inspect.isclass(made) else made
    hints = typing.get_type_hints(target, include_extras=True)
    parameters = inspect.signature(target).parameters
    # `limit: int = None` takes null, as its default is
    return {
        name: typing.Optional[hint] if parameters[name].default is None else hint  # noqa: UP045 - hints may be texts
        for name, hint in hints.items()
        if name in parameters
    }
