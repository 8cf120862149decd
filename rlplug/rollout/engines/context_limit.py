"""What a context leaves for a completion."""

from __future__ import annotations

from rlplug.errors import RunError
from rlplug.interfaces.rollout import PolicySpec
from rlplug.types import Request


def max_completion_tokens(request: Request, policy: PolicySpec, context: int, key: str) -> int:
    """Return how many tokens the context leaves for a completion.

    Args:
        request: Has the prompt.
        policy: Of whose own context the engine's may be a part.
        context: Of the engine: prompt and completion together, in tokens.
        key: The engine's option that sets it.

    Raises:
        RunError: None.
    """
    room = context - len(request.prompt_ids)
    if room < 1:
        remedy = f"raise rollout.{key}" if context < policy.max_context else "shorten it"
        raise RunError(
            f"request {request.request_id}: its prompt has {len(request.prompt_ids)} tokens, and the engine's context "
            f"ends at {context}: {remedy}, or let data.max_prompt_tokens filter it."
        )
    return room
