"""Maximum completion length that fits an engine's context."""

from __future__ import annotations

from rlplug.errors import RunError
from rlplug.interfaces.rollout import PolicySpec
from rlplug.types import Request


def max_completion_tokens(request: Request, policy: PolicySpec, context: int | None = None, key: str = "") -> int:
    """Return how many tokens the context leaves for a completion.

    Args:
        request: Has the prompt.
        policy: The engine's context may be a part of the policy's.
        context: Of the engine: prompt and completion together, in tokens; ``None`` is the policy's.
        key: The engine's option that sets it.

    Raises:
        RunError: It leaves none.
    """
    limit = policy.max_context if context is None else context
    left = limit - len(request.prompt_ids)
    if left < 1:
        remedy = f"raise rollout.{key}" if limit < policy.max_context else "shorten it"
        raise RunError(
            f"request {request.request_id}: its prompt has {len(request.prompt_ids)} tokens, and the engine's context "
            f"ends at {limit}: {remedy}, or let data.max_prompt_tokens filter it."
        )
    return left
