"""From rlplug's requests to vLLM's sampling parameters, and from its outputs to completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlplug.errors import RunError
from rlplug.interfaces import PolicySpec
from rlplug.types import Completion, FinishReason, Request, SamplingParams


def sampling_arguments(request: Request, sampling: SamplingParams, policy: PolicySpec, room: int) -> dict[str, Any]:
    """Return the arguments of vLLM's ``SamplingParams`` for one request, as plain data."""
    return {
        "max_tokens": min(request.limit(sampling), room),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": request.seed,
        "stop_token_ids": list(policy.eos_token_ids),
        "ignore_eos": True,  # the end tokens are stop_token_ids
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
    }


def to_completion(
    request_id: str, token_ids: Sequence[int], logprobs: Sequence[float], finish_reason: str | None, version: int
) -> Completion:
    """Return what vLLM generated as a completion.

    Raises:
        RunError: It ended in a way that training has no use for.
    """
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    if finish_reason not in reasons:
        raise RunError(f"request {request_id}: vLLM ended it with finish reason {finish_reason!r}.")
    return Completion(request_id, tuple(token_ids), tuple(logprobs), reasons[finish_reason], version)
