"""From rlplug's requests to TensorRT-LLM's sampling parameters, and from its outputs to completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from rlplug_engines.colocated import LoopRequests, RunningRequest

from rlplug.errors import RunError
from rlplug.token_arrays import TokenFloats, TokenIds, TokenRecord, as_tokens
from rlplug.types import Completion, FinishReason

PROCESSED: Final = "processed"
"""Logprobs after temperature, top-k and top-p, renormalised over what these keep; of a greedy request 0."""
RAW: Final = "raw"
"""Logprobs of the model, before temperature."""

SAMPLING_EXTRA: Final = frozenset(("frequency_penalty", "min_p", "presence_penalty", "repetition_penalty"))
"""Fields of TensorRT-LLM's ``SamplingParams`` that ``sampling.extra`` may have. Not tried on a GPU."""

NO_END: Final = -1
"""An end token that is never sampled; without one, TensorRT-LLM would ask a tokenizer."""


@dataclass(frozen=True, eq=False)
class Output(TokenRecord):
    """What TensorRT-LLM returned for one request."""

    token_ids: TokenIds
    """int32 [n]"""
    logprobs: TokenFloats
    """float32 [n]"""
    finish_reason: str

    def __post_init__(self) -> None:
        self.convert(token_ids=np.int32, logprobs=np.float32)

    @classmethod
    def of(cls, result: Any) -> Output:
        """Read what ``generate_async`` resolves to; ``RunError`` when a token has no logprob."""
        (generated,) = result.outputs
        token_ids = [int(token) for token in generated.token_ids]
        entries: Sequence[Mapping[int, Any]] = generated.logprobs or ()
        reason = str(generated.finish_reason)
        if reason == "cancelled":  # the newest of its tokens may have come before its logprob, or after
            token_ids, entries = token_ids[: len(entries)], entries[: len(token_ids)]
        if len(entries) != len(token_ids):
            raise RunError(f"TensorRT-LLM returned {len(token_ids)} tokens and {len(entries)} logprobs.")
        for token_id, entry in zip(token_ids, entries, strict=True):
            if token_id not in entry:  # the first of a position may be the likeliest token's
                raise RunError(f"TensorRT-LLM returned logprobs without that of the sampled token {token_id}.")
        logprobs = [float(entry[token_id].logprob) for token_id, entry in zip(token_ids, entries, strict=True)]
        return cls(as_tokens(token_ids, np.int32), as_tokens(logprobs, np.float32), reason)


class TRTLLMRequests(LoopRequests[Output]):
    """Requests in TensorRT-LLM."""

    engine = "TensorRT-LLM"

    def arguments(self, running: RunningRequest) -> dict[str, Any]:
        """Return the arguments of ``SamplingParams`` for one request, as plain data; no default decides on a token.

        The first end token is ``end_id``, which is always in the output. Others are stop tokens, which are there with
        ``include_stop_str_in_output`` alone.
        """
        sampling = running.sampling
        first, *others = self.policy.eos_token_ids or (NO_END,)
        # top_k=1 is greedy whatever the others are, and greedy logprobs are the untempered ones
        drawn = (1.0, 1.0, 1) if sampling.is_greedy else (sampling.temperature, sampling.top_p, sampling.top_k)
        temperature, top_p, top_k = drawn
        return {
            **sampling.extra,
            "max_tokens": running.max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,  # 0 is all
            "n": 1,
            "seed": running.request.seed % (1 << 63),
            "end_id": first,
            "pad_id": self.policy.pad_token_id,
            "stop_token_ids": others or None,
            "include_stop_str_in_output": True,
            "ignore_eos": False,
            "detokenize": False,
            "logprobs": 0,  # of the sampled token alone
            "logprobs_mode": RAW if sampling.is_greedy else PROCESSED,
        }

    def completion(self, running: RunningRequest, output: Output) -> Completion:
        reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "cancelled": "abort"}
        name, ends = running.request.request_id, self.policy.eos_token_ids
        if output.finish_reason not in reasons:
            raise RunError(f"request {name}: TensorRT-LLM ended it with finish reason {output.finish_reason!r}.")
        reason, num_tokens = reasons[output.finish_reason], len(output.token_ids)
        has_end = num_tokens > 0 and int(output.token_ids[-1]) in ends
        if reason == "length" and has_end:
            reason = "stop"
        if reason == "stop" and not has_end:
            raise RunError(f"request {name}: TensorRT-LLM stopped it and left its end token out, which training needs.")
        return Completion(name, output.token_ids, output.logprobs, reason, self.version)
