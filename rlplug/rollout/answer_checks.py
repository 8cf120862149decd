"""Checks of what an engine generated, before training reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlplug.errors import brief
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.engines import FINISH_REASONS, LOWEST, ROUNDING, SourceOfTokens
from rlplug.interfaces.rollout import EngineFault, PolicySpec
from rlplug.token_arrays import TokenFloats, TokenIds, as_tokens
from rlplug.types import Completion


def check_tokens(
    source: object,
    token_ids: TokenIds | Sequence[int],
    logprobs: TokenFloats | Sequence[float],
    max_tokens: int,
    vocab_size: int | None,
    has_logprobs: bool = True,
) -> tuple[TokenIds, TokenFloats]:
    """Check the tokens and logprobs of one completion, and return them as arrays, read-only int32 [n] and float32 [n].

    Args:
        source: Who generated it, for messages, as its ``str`` says: a server's URL, or the engine and the request.
        token_ids: The generated tokens.
        logprobs: One for each token.
        max_tokens: Most tokens that were asked for.
        vocab_size: Tokens that the policy embeds; ``None`` where it is not known.
        has_logprobs: Whether the engine returns logprobs; otherwise they may be any numbers.

    Raises:
        EngineFault: They are not what an engine can have sampled; the message names the field and the value.
    """
    if len(token_ids) > max_tokens:
        raise EngineFault(f"{source} returned {len(token_ids)} token ids where at most {max_tokens} were asked for.")
    if len(logprobs) != len(token_ids):
        raise EngineFault(f"{source} returned {len(logprobs)} logprobs for {len(token_ids)} tokens.")
    ids = _array(source, "token ids", token_ids, "iu")
    wrong = (ids < 0) | (ids >= (1 << 31 if vocab_size is None else vocab_size))
    if wrong.any():
        index = int(wrong.argmax())
        known = "" if vocab_size is None else f", and the policy has ids from 0 to {vocab_size - 1}"
        raise EngineFault(f"{source} returned the token id {ids[index]} at index {index}{known}.")
    values = _array(source, "logprobs", logprobs, "fiu")
    if has_logprobs:
        wrong = ~((values >= LOWEST) & (values <= ROUNDING))  # true for NaN
        if wrong.any():
            index = int(wrong.argmax())
            raise EngineFault(
                f"{source} returned the logprob {values[index]} at index {index}, and no logarithm of a probability is "
                "that."
            )
    return as_tokens(ids, np.int32), as_tokens(values, np.float32)


def check_completion(source: SourceOfTokens, completion: Completion, policy: PolicySpec, version: int) -> None:
    """Check what a completion says of itself: version, reason, and where its end tokens are.

    Args:
        source: Who returned it.
        completion: Its tokens were checked.
        policy: Has the end tokens.
        version: Version of the weights that the engine got last.

    Raises:
        EngineFault: The message says what was expected, and what came.
    """
    if completion.policy_version != version:
        raise EngineFault(
            f"{source} returned policy version {completion.policy_version!r}, and its weights are of version {version}."
        )
    reason, num_tokens = completion.finish_reason, len(completion.token_ids)
    if reason not in FINISH_REASONS:
        raise EngineFault(f"{source} returned finish reason {brief(reason)}: it is one of {FINISH_REASONS}.")
    if not num_tokens and reason != "abort":
        raise EngineFault(f"{source} returned no token and the finish reason {reason!r}.")
    ends = np.flatnonzero(np.isin(completion.token_ids, policy.eos_token_ids))
    if len(ends) and ends[0] < num_tokens - 1:
        token = completion.token_ids[ends[0]]
        raise EngineFault(f"{source} returned {num_tokens} tokens, and the end token {token} is at index {ends[0]}.")
    may_be_string = policy.stop and reason == "stop"
    if policy.eos_token_ids and not may_be_string and reason != "abort" and bool(len(ends)) != (reason == "stop"):
        raise EngineFault(
            f"{source} returned finish reason {reason!r} and the last token {completion.token_ids[-1]}: it is 'stop' "
            f"exactly where the last token is one of the policy's end tokens, {list(policy.eos_token_ids)}."
        )


def order_fault(call: PluginCall, completions: Sequence[Completion], wanted: Sequence[str]) -> EngineFault:
    """Return the fault of completions that are not those of the requests, in the order of the requests."""
    found = [each.request_id for each in completions]
    must = f"return the completions of {len(wanted)} requests in their order"
    if len(found) != len(wanted):
        missing = next((name for name in wanted if name not in found), None)
        did = f"returned {len(found)}" + (f", and none of request {missing}" if missing else "")
    else:
        index = next(index for index, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other)
        did = f"returned {brief(found[index])} at index {index}, where {wanted[index]} was asked for"
    fault = call.violation(must, did, EngineFault)
    assert isinstance(fault, EngineFault)
    return fault


def _array(source: object, field: str, values: Any, kinds: str) -> np.ndarray[Any, Any]:
    """Return numbers as an array; ``kinds`` are NumPy's letters of the allowed dtypes."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # lists of different lengths
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
        odd = next((value for value in values if type(value) not in (int, float)), values)
        raise EngineFault(f"{source} returned {field} that are not all numbers, but also {brief(odd)}.")
    return array
