"""State of the whole process that a plugin's call must leave as it was."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Final

import torch

from rlplug.interfaces.checks.calls import PluginCall

_SPOILS: Final = frozenset({"default_dtype", "default_device", "gradients"})
"""What later steps would compute otherwise with: a change is an error. Any other change is a warning."""
_WORDS: Final = {
    "default_dtype": "torch's default dtype",
    "default_device": "torch's default device",
    "gradients": "torch.is_grad_enabled()",
    "num_threads": "torch.get_num_threads()",
    "torch_seed": "the seed of torch's global generator",
    "interrupt": "the handler of SIGINT",
    "terminate": "the handler of SIGTERM",
    "folder": "the working directory",
}
_SAID: set[tuple[str, str]] = set()
"""Calls and fields that were warned of."""


@dataclass(frozen=True)
class ProcessState:
    """A process's state; reading it takes a few microseconds.

    Of random generators only torch's seed is here: that it was drawn from is no fault, and Python's and NumPy's
    generators do not tell a seed from a draw.
    """

    default_dtype: torch.dtype
    default_device: torch.device
    gradients: bool
    num_threads: int
    torch_seed: int
    interrupt: Any
    terminate: Any
    folder: str

    @staticmethod
    def now() -> ProcessState:
        return ProcessState(
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.initial_seed(),
            signal.getsignal(signal.SIGINT),
            signal.getsignal(signal.SIGTERM),
            _folder(),
        )

    def require_unchanged(self, call: PluginCall) -> None:
        """Compare with the state of now, after ``call``.

        Raises:
            RunError: The default dtype, the default device or the mode of gradients has changed. Anything else that
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


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody has removed it
        return ""


@contextmanager
def watched(call: PluginCall) -> Iterator[None]:
    """Require that the body, which makes ``call``, leaves the process's state as it was.

    Raises:
        RunError: As :meth:`ProcessState.require_unchanged`. An exception of the body is raised as it is.
    """
    before = ProcessState.now()
    yield
    before.require_unchanged(call)
