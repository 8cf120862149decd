"""From rlplug's requests to SGLang's sampling parameters, and from its outputs to completions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rlplug.errors import RunError
from rlplug.interfaces import PolicySpec
from rlplug.token_arrays import TokenFloats, TokenIds, as_tokens
from rlplug.types import Completion, FinishReason, Request, SamplingParams

SAMPLING_EXTRA: Final = frozenset(("frequency_penalty", "min_p", "presence_penalty"))
"""Fields of SGLang's ``SamplingParams`` that ``sampling.extra`` may have. SGLang adds the penalties to the logits that
:mod:`rlplug_rollout_sglang.sampler` gets, and that has ``min_p``."""


def sampling_arguments(request: Request, sampling: SamplingParams, policy: PolicySpec, room: int) -> dict[str, Any]:
    """Return the arguments of SGLang's ``SamplingParams`` for one request, as plain data.

    SGLang reads temperature 0 as greedy, by itself. With ``ignore_eos`` it would ignore ``stop_token_ids`` too.
    """
    return {
        **sampling.extra,
        "max_new_tokens": min(request.limit(sampling), room),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,  # all of them
        "sampling_seed": request.seed % (1 << 63),
        "stop_token_ids": list(policy.eos_token_ids),
        "ignore_eos": False,
    }


@dataclass(frozen=True, eq=False)
class Output:
    """What SGLang returned for one request."""

    token_ids: TokenIds
    """int32 [n]"""
    logprobs: TokenFloats
    """float32 [n], of the distribution that :mod:`rlplug_rollout_sglang.sampler` drew from."""
    finish_reason: str
    weight_version: str
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt: those that were in the prefix cache."""
    retractions: int
    """How often it was stopped, to be computed anew."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Output:
        """Read the dictionary that ``generate`` of SGLang yields; one that never ran lacks some of its entries."""
        about = answer["meta_info"]
        entries = about.get("output_token_logprobs") or ()
        token_ids = as_tokens(answer["output_ids"], np.int32)
        logprobs = as_tokens([float(entry[0]) for entry in entries], np.float32)
        scored = as_tokens([int(entry[1]) for entry in entries], np.int32)
        reason = str(about["finish_reason"]["type"])
        if reason == "abort":  # its newest tokens may have come before their logprobs, or after
            num_whole = min(len(token_ids), len(scored))
            token_ids, logprobs, scored = token_ids[:num_whole], logprobs[:num_whole], scored[:num_whole]
        assert np.array_equal(token_ids, scored), "there is one logprob for each token, of that token"
        return cls(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            weight_version=str(about["weight_version"]),
            prompt_tokens=int(about.get("prompt_tokens") or 0),
            cached_tokens=int(about.get("cached_tokens") or 0),
            retractions=int(about.get("num_retractions") or 0),
        )


def to_completion(
    request: Request, sampling: SamplingParams, output: Output, end_tokens: Collection[int], version: int
) -> Completion:
    """Return what SGLang generated as a completion.

    Args:
        end_tokens: Of the policy. SGLang looks at the length first: of a completion whose last possible token is an end
            token it says ``length``.
        version: Of the policy, which the engine must have had.

    Raises:
        RunError: It ended in a way that training has no use for, or came from other weights.
    """
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    if output.finish_reason not in reasons:
        raise RunError(f"request {request.request_id}: SGLang ended it with finish reason {output.finish_reason!r}.")
    if output.weight_version != str(version):
        raise RunError(
            f"request {request.request_id}: SGLang generated with weights of version {output.weight_version}, and the "
            f"policy has version {version}: the weight sync did not reach the engine."
        )
    has_end = len(output.token_ids) > 0 and int(output.token_ids[-1]) in end_tokens
    has_ended = output.finish_reason == "length" and has_end
    reason = "stop" if has_ended else reasons[output.finish_reason]
    # SGLang takes top_k=1 for greedy, whose logprobs are untempered; what is drawn with top_k=1 has no choice
    has_choice = sampling.is_greedy or sampling.top_k != 1
    logprobs = output.logprobs if has_choice else np.zeros_like(output.logprobs)
    return Completion(request.request_id, output.token_ids, logprobs, reason, version)
