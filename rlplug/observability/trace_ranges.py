"""Named ranges: what phases and calls of the engine are called in a profiler's trace, while one is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, TypeAlias

PREFIX: Final = "rlplug/"
"""What every range's name begins with in a trace; a phase's goes on with its name, as in ``rlplug/update``."""

ENGINE: Final = "engine/"
"""What the name of a call of the engine goes on with, as in ``rlplug/engine/generate``."""

MakeRange: TypeAlias = Callable[[str], AbstractContextManager[Any]]

_NOTHING: Final = nullcontext()


def _make_no_range(name: str) -> AbstractContextManager[Any]:
    return _NOTHING


_make_range: MakeRange = _make_no_range


def trace_range(name: str) -> AbstractContextManager[Any]:
    """Return a context that a trace shows as ``rlplug/<name>``; it does nothing while none is taken."""
    return _make_range(PREFIX + name)


@contextmanager
def ranges_made_by(make_range: MakeRange) -> Iterator[None]:
    """Let a profiler make the ranges inside, such as with ``torch.profiler.record_function``."""
    global _make_range
    former, _make_range = _make_range, make_range
    try:
        yield
    finally:
        _make_range = former
