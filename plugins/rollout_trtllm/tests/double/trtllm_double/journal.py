"""The calls that engines of this process got, in their order."""

from __future__ import annotations

from typing import Any

calls: list[tuple[str, Any]] = []
"""Name and summary: tags for release and resume, the names of a bucket or ``None`` for update_weights, the length of
the prompt for generate_async, the method for collective_rpc, the request for abort, sorted keywords for AsyncLLM."""


def record(name: str, summary: Any = None) -> None:
    """Note a call."""
    calls.append((name, summary))


def clear_calls() -> None:
    """Forget all calls."""
    calls.clear()
