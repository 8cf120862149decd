"""State of the whole process that a plugin's call must leave as it was."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Final

import torch

from rlplug.interfaces.checks.calls import PluginCall

_SPOILS: Final = frozenset({"default_dtype", "gradients"})
"""What later steps would compute otherwise with: a change is an error. Any other change is a warning."""
_WORDS: Final = {
    "default_dtype": "torch's default dtype",
    "gradients": "torch.is_grad_enabled()",
    "num_threads": "torch.get_num_threads()",
    "torch_seed": "the seed of torch's global generator",
    "interrupt": "the handler of SIGINT",
    "terminate": "the handler of SIGTERM",
}
_SAID: set[tuple[str, str]] = set()
"""Calls and fields that were warned of."""

_handler: Final[Callable[[int], Any]] = sys.modules["_signal"].getsignal
"""``signal.getsignal`` itself: what surrounds it tries to make an enum of the handler, and takes most of the time."""


@dataclass(frozen=True)
class ProcessState:
    """A process's state; reading it takes a few microseconds.

    Of random generators only torch's seed is here: that it was drawn from is no fault, and Python's and NumPy's
    generators do not tell a seed from a draw.
    """

    default_dtype: torch.dtype
    gradients: bool
    num_threads: int
    torch_seed: int
    interrupt: Any
    terminate: Any

    @staticmethod
    def now() -> ProcessState:
        return ProcessState(
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.initial_seed(),
            _handler(signal.SIGINT),
            _handler(signal.SIGTERM),
        )

    def require_unchanged(self, call: PluginCall) -> None:
        """Compare with the state of now, after ``call``.

        Raises:
            RunError: The default dtype or the mode of gradients has changed. Anything else that
                changed is a warning, once for each call and field.
        """
        after = ProcessState.now()
        if after == self:
            return
        for name in (field.name for field in fields(self)):
            former, new = getattr(self, name), getattr(after, name)
            if former == new:
                continue
            problem = call.violation(f"leave {_WORDS[name]} at {former}", f"left {new}")
            if name in _SPOILS:
                raise problem
            if (str(call), name) not in _SAID:
                _SAID.add((str(call), name))
                warnings.warn(f"{problem} Restore it there.", stacklevel=3)


@contextmanager
def watched(call: PluginCall) -> Iterator[None]:
    """Require that the body, which makes ``call``, leaves the process's state as it was.

    Raises:
        RunError: As :meth:`ProcessState.require_unchanged`. An exception of the body is raised as it is.
    """
    before = ProcessState.now()
    yield
    before.require_unchanged(call)
