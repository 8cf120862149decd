"""Errors that users see, and safe text of what comes from outside.

Each message names the key or the part, the value, and what to do instead.
"""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

LONGEST_TEXT: Final = 500
"""Longest text of an exception in a message, in characters."""


class RLPlugError(Exception):
    """Base of every error that the command line prints as one message, without a traceback."""


class ConfigError(RLPlugError, ValueError):
    """Error in the configuration, raised before training starts."""


class PluginError(RLPlugError):
    """Error of a plugin that cannot be loaded, or of two plugins that conflict."""


class RunError(RLPlugError, RuntimeError):
    """Error that stops a run; the message says what is saved and how to go on."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the choice nearest to ``name``, or an empty string when none is near."""
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    return f" Did you mean {by_lower[near[0]]!r}?" if near else ""


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that led to it, the newest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def encodable(text: str) -> str:
    """Return text with a ``?`` for each half of a surrogate pair, which neither UTF-8 nor a tokenizer can encode."""
    plain = str.__str__(text)  # of a subclass too, whose methods may do anything
    return plain if plain.isascii() else plain.encode(errors="replace").decode()


def safe_repr(value: Any, longest: int = 200) -> str:
    """Return the ``repr`` of a value from outside, whose ``__repr__`` may raise or return megabytes."""
    try:
        return encodable(repr(value)[:longest])
    except BaseException as problem:  # noqa: BLE001 - its own code may raise anything, SystemExit too
        return f"(its repr raises {type(problem).__name__})"


def brief(value: Any, longest: int = 60) -> str:
    """Return type and :func:`safe_repr` of a value from outside."""
    return f"{type(value).__name__} {safe_repr(value, longest)}"


def describe(error: BaseException, with_line: bool = False) -> str:
    """Return type and message of an exception from outside, at most 500 characters, whose ``__str__`` may raise.

    Args:
        with_line: Add the file and line that raised it.
    """
    try:
        text = encodable(str(error)[:LONGEST_TEXT])
    except BaseException as problem:  # noqa: BLE001 - likewise
        text = f"(its message cannot be read: {type(problem).__name__})"
    where = _line_of(error) if with_line else ""
    name = type(error).__name__
    return f"{name}: {text}{where}" if text else f"{name}{where}"


def _line_of(error: BaseException) -> str:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return f" (at {os.path.basename(last.tb_frame.f_code.co_filename)}:{last.tb_lineno})" if last else ""


def shorten(value: object) -> str:
    """Return a value for a message: of a long one only its ends."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(value)
