"""What ``update_weights`` gets: the contract's ``wire``."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import io
import pickle
from typing import Any, Final

from trtllm_double.contract import WIRE

_DISALLOWED: Final = {("torch.storage", "_load_from_bytes"), ("torch.hub", "_load_local"), ("torch", "save")}
"""Globals that ``WorkerExtension.update_weights`` excludes by name, in ``tensorrt_llm/llmapi/rlhf_utils.py``. The first
is what a CPU tensor's own pickle calls."""


class _Unpickler(pickle.Unpickler):
    """Contract ``wire.pickle_globals``."""

    def find_class(self, module: str, name: str) -> Any:
        is_listed = any(fnmatch.fnmatchcase(module, pattern) for pattern in WIRE["pickle_globals"])
        if not is_listed or (module, name) in _DISALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} may not be loaded: only {WIRE['pickle_globals']} may")
        return super().find_class(module, name)


def decode(payload: Any) -> list[tuple[str, tuple[Any, tuple[Any, ...]]]]:
    """Return names and handles of one worker's payload.

    Raises:
        TypeError: It is no text.
        ValueError: It is no base64 of a pickled list of (name, (callable, args)), or has a name twice.
        pickle.UnpicklingError: It asks for a global that is not allowed.
    """
    if not isinstance(payload, str):
        raise TypeError(f"a payload must be base64 text, as {WIRE['weights']} says, and is a {type(payload).__name__}")
    try:
        pickled = base64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise ValueError(f"a payload is no base64: {error}") from error
    items = _Unpickler(io.BytesIO(pickled)).load()
    if not isinstance(items, list):
        raise ValueError(f"a payload must be a pickled list, and is a {type(items).__name__}")
    for item in items:
        match item:
            case (str(), (func, tuple())) if callable(func):
                pass
            case _:
                raise ValueError(f"a payload has {item!r} instead of (name, (rebuild_callable, args))")
    names = [name for name, _ in items]
    if len(set(names)) != len(names):
        raise ValueError(f"a payload has a name twice: {sorted(names)}")
    return items


def names_of(weights: Any) -> tuple[str, ...] | None:
    """Return the names that an update brings, for the journal; none of them where it cannot be read."""
    if weights is None:
        return None
    try:
        return tuple(name for name, _ in decode(next(iter(weights.values()))))
    except (AttributeError, EOFError, StopIteration, TypeError, ValueError, pickle.UnpicklingError):
        return ()
