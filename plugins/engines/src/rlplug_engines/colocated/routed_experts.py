"""Experts that vLLM's and SGLang's routers chose, brought into the form of ``Completion.routed_experts``."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rlplug.interfaces.rollout import EngineFault
from rlplug.interfaces.router_replay import RouterShape
from rlplug.rollout.routed_experts import no_such_expert

Array = np.ndarray[Any, Any]

OF_EVERY_LAYER: Final = 3
"""Dimensions of what vLLM and SGLang return: tokens that were read, decoder layers, experts."""


def experts_of_request(source: str, rows: Array | None, num_tokens: int, routers: RouterShape) -> Array:
    """Return ``Completion.routed_experts`` from what an engine returns of every decoder layer.

    Args:
        source: Who returned it, for messages: the engine and the request.
        rows: Integers [num_tokens - 1, decoder layers, k]: what the engine recorded of prompt and completion, of which
            it never read the last token. ``None`` where it recorded nothing, as of an aborted request.
        num_tokens: Tokens of prompt and completion.
        routers: Routers of the policy.

    Returns:
        int8 or int16 [num_tokens, L, k], with -1 for the last token.

    Raises:
        EngineFault: The rows have another shape.
    """
    experts = routers.empty(num_tokens)
    if rows is None:
        return experts
    expected = f"[{num_tokens - 1}, more than {routers.layers[-1]}, {routers.top_k}]"
    if rows.ndim != OF_EVERY_LAYER or rows.shape[1] <= routers.layers[-1]:
        raise EngineFault(f"{source} returned routed experts of shape {list(rows.shape)}, and not {expected}.")
    if (len(rows), rows.shape[2]) != (num_tokens - 1, routers.top_k):
        raise EngineFault(f"{source} returned routed experts of shape {list(rows.shape)}, and not {expected}.")
    of_routers = rows[:, list(routers.layers)]
    if of_routers.size and int(of_routers.max()) >= routers.num_experts:  # before it is cut to fewer bits
        raise no_such_expert(source, int(of_routers.max()), routers)
    experts[:-1] = of_routers
    return experts
