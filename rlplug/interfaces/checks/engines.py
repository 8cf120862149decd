"""What an engine returns: completions, the report of a weight sync, and counters."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

import numpy as np
from numpy.typing import NDArray

from rlplug.errors import brief
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.metrics import read_metrics
from rlplug.interfaces.rollout import EngineFault, PolicySpec, RolloutEngine
from rlplug.interfaces.weight_sync import SyncReport
from rlplug.types import Completion, FinishReason

FINISH_REASONS: Final[tuple[FinishReason, ...]] = get_args(FinishReason)
ROUNDING: Final = 1e-3
"""How far above 0 rounding may put a logprob."""
PART_TOKENS: Final = 1 << 16
"""Tokens that are looked at together, at least, unless there are fewer."""
LOWEST: Final = -1e30
"""Lowest logprob; training reads them in float32."""


@dataclass(frozen=True)
class SourceOfTokens:
    """An engine's call and one of its requests, for messages."""

    call: PluginCall
    request_id: str

    def __str__(self) -> str:
        return f"{self.call}, at request {self.request_id},"


def are_sound(
    completions: Sequence[Completion], limits: Sequence[int], policy: PolicySpec, version: int, has_logprobs: bool
) -> bool:
    """Return whether all completions are what the engine was asked for, looking at all of their tokens at once.

    False says that some may not be: :func:`check_completion` and ``check_tokens`` name which, and why.
    """
    if not completions:
        return True
    try:
        fields = [(each.token_ids, each.logprobs, each.finish_reason, each.policy_version) for each in completions]
        ids, logprobs, reasons, versions = zip(*fields, strict=True)
        lengths = list(map(len, ids))
        return (
            list(map(len, logprobs)) == lengths
            and all(map(operator.le, lengths, limits))
            and versions.count(version) == len(versions)
            and sum(map(reasons.count, FINISH_REASONS)) == len(reasons)
            and all(length or reason == "abort" for length, reason in zip(lengths, reasons, strict=True))
            and all(
                _are_drawn(ids[part], logprobs[part], lengths[part], reasons[part], policy, has_logprobs)
                for part in _parts(lengths)
            )
        )
    except (TypeError, ValueError):  # a field is no array
        return False


def _parts(lengths: Sequence[int]) -> Iterator[slice]:
    """Yield slices of completions with few enough tokens that what is computed of them stays in the cache."""
    first = num_tokens = 0
    for index, length in enumerate(lengths):
        num_tokens += length
        if num_tokens > PART_TOKENS:
            yield slice(first, index + 1)
            first, num_tokens = index + 1, 0
    if num_tokens:
        yield slice(first, len(lengths))


def _are_drawn(
    ids: Sequence[NDArray[Any]],
    logprobs: Sequence[NDArray[Any]],
    lengths: Sequence[int],
    reasons: Sequence[str],
    policy: PolicySpec,
    has_logprobs: bool,
) -> bool:
    """Return whether tokens are in the vocabulary, logprobs finite and not above 0, and end tokens in their place."""
    tokens, values = np.concatenate(ids), np.concatenate(logprobs)
    if tokens.dtype != np.int32 or values.dtype != np.float32 or tokens.ndim != 1 or values.ndim != 1:
        return False
    most = (1 << 31) - 1 if policy.vocab_size is None else policy.vocab_size - 1
    if tokens.min() < 0 or tokens.max() > most:
        return False
    if has_logprobs and not (values.min() >= LOWEST and values.max() <= ROUNDING):  # either is false for NaN
        return False
    if not policy.eos_token_ids:
        return True
    is_end = tokens == policy.eos_token_ids[0]
    for end in policy.eos_token_ids[1:]:
        is_end |= tokens == end
    sizes = np.array(lengths)
    at_last = is_end[sizes.cumsum() - 1] & (sizes > 0)
    stops, aborts = (np.array([reason == each for reason in reasons]) for each in ("stop", "abort"))
    is_right = at_last == stops if not policy.stop else stops | ~at_last  # a stop string needs no end token
    return np.count_nonzero(is_end) == np.count_nonzero(at_last) and bool((is_right | aborts).all())


def check_list(call: PluginCall, completions: Any) -> Sequence[Completion]:
    """Return what a call gave as completions, which must be a list of them."""
    if not isinstance(completions, Sequence) or not all(isinstance(each, Completion) for each in completions):
        raise call.violation("return a list of completions", f"returned {brief(completions)}", EngineFault)
    return completions


def check_report(call: PluginCall, report: Any, version: int) -> SyncReport:
    """Return the report of a weight sync of ``version``.

    Raises:
        RunError: It is of another version, or no report, or its parts are not seconds by name.
    """
    if not isinstance(report, SyncReport):
        raise call.violation("return a SyncReport", f"returned {brief(report)}")
    if report.policy_version != version:
        raise call.violation(f"report policy version {version}", f"reported {report.policy_version!r}")
    return dataclasses.replace(report, parts=read_metrics(call, report.parts))


def max_context_of(engine: RolloutEngine, policy: PolicySpec) -> int:
    """Return an engine's context in tokens, which must be a part of the policy's."""
    call, found = PluginCall(engine, "max_context"), engine.max_context(policy)
    if type(found) is not int or not 0 < found <= policy.max_context:
        must = f"return a number of tokens up to the policy's context of {policy.max_context}"
        raise call.violation(must, f"returned {brief(found)}")
    return found


def check_stats(call: PluginCall, stats: Any, core_names: frozenset[str]) -> dict[str, float]:
    """Return an engine's counters, which must be numbers, under names that the core leaves free."""
    found: Mapping[str, float] = read_metrics(call, stats)
    for name in sorted(core_names & found.keys()):
        raise call.violation("give its counters names of their own", f"returned {name!r}, which rlplug measures")
    return dict(found)
