"""Named ranges that mark phases and engine calls in a profiler's trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, TypeAlias

PREFIX: Final = "rlplug/"
"""Prefix of every range's name in a trace; the name of a phase follows, as in ``rlplug/update``."""

ENGINE: Final = "engine/"
"""Second prefix of the names of engine calls, as in ``rlplug/engine/generate``."""

MakeRange: TypeAlias = Callable[[str], AbstractContextManager[Any]]

_NOTHING: Final = nullcontext()
_make_range: MakeRange = lambda name: _NOTHING  # noqa: E731


def trace_range(name: str) -> AbstractContextManager[Any]:
    """Return a context manager that a trace shows as ``rlplug/<name>``; without a profiler it does nothing."""
    return _make_range(PREFIX + name)


@contextmanager
def ranges_made_by(make_range: MakeRange) -> Iterator[None]:
    """Make ranges with ``make_range``, such as ``torch.profiler.record_function``, in the body of the ``with``."""
    global _make_range
    former, _make_range = _make_range, make_range
    try:
        yield
    finally:
        _make_range = former
