"""Reasons for which a completion ended."""

from __future__ import annotations

from typing import Final

from rlplug.errors import RunError
from rlplug.types import FinishReason

FINISH_REASONS: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length", "abort": "abort"}


def as_finish_reason(engine: str, request_id: str, reason: str | None) -> FinishReason:
    """Return the reason that an engine gives, if training has a use for completions that end so.

    Raises:
        RunError: It has none.
    """
    if not isinstance(reason, str) or reason not in FINISH_REASONS:
        raise RunError(f"request {request_id}: {engine} ended it with finish reason {repr(reason)[:100]}.")
    return FINISH_REASONS[reason]
