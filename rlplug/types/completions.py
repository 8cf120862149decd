"""What goes to an engine and comes back: prompts, requests and completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeAlias

import numpy as np

from rlplug.errors import ConfigError
from rlplug.token_arrays import TokenFloats, TokenIds, TokenRecord
from rlplug.types.ranges import PositiveShare, Range, Tokens, check_ranges

GIB: Final = 1 << 30
"""Bytes of a GiB."""

NO_VERSION: Final = -1
"""Policy version of a token that no policy produced, and of an engine without weights."""

NOT_RECORDED: Final = -1
"""Expert id of a token whose experts the engine did not return; the trainer's own router decides there."""

ENVIRONMENT: Final = "environment"
"""Name of the environment's own reward among a sample's rewards."""

TRAJECTORY: Final = "trajectory"
"""Name, among a sample's rewards, of the error of a trajectory without environment that was given up."""

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""Why a completion ended: an end token or stop string (``stop``), ``max_new_tokens`` (``length``) or ``abort``."""


@dataclass(frozen=True)
class Prompt:
    """One task for the policy, tokenised once: all phases of a step work on ``token_ids``.

    Attributes:
        uid: Stable name within its source, such as ``train.jsonl:17``.
        text: Text of the tokens: the rendered chat template, or the plain prompt.
        answer: Reference answer for verifiers; ``None`` when the task has none.
        source: Name of its source in a mixture; empty without one (hook API 2.1).
        messages: Chat messages of its row, with ``role`` and ``content``, before a template or a system prompt of the
            run were put around them; empty for a plain text (hook API 2.1).
    """

    uid: str
    token_ids: tuple[int, ...]
    text: str
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    messages: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options. The defaults sample from the policy's own distribution.

    Args:
        max_new_tokens: Longest completion, in tokens.
        temperature: Divides the logits before sampling; 0 means greedy.
        top_p: Keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: Keep this many tokens; 0 keeps all.
        stop: Strings that end a completion, which keeps them, such as ``["</search>"]``, whichever tokens spell them.
        extra: Options that the engine knows and rlplug does not, such as ``{min_p: 0.1}``, which it gets as they are.
            The trainer computes its logprobs without them: ``limits.mismatch_gate`` stops a run where that matters.
    """

    max_new_tokens: Tokens = 256
    temperature: Annotated[float, Range(0, 100)] = 1.0
    top_p: PositiveShare = 1.0
    top_k: Annotated[int, Range(0, 10_000_000)] = 0
    stop: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict, hash=False)  # a dictionary has none; nobody changes it

    def __post_init__(self) -> None:
        check_ranges(self, "sampling")
        object.__setattr__(self, "stop", tuple(self.stop))  # JSON has lists
        if "" in self.stop:
            raise ConfigError("sampling.stop has an empty string, which would end each completion: remove it.")
        if ours := sorted(self.extra.keys() & vars(self).keys()):
            raise ConfigError(f"sampling.extra.{ours[0]} is {self.extra[ours[0]]!r}: set sampling.{ours[0]} instead.")
        if 0 < self.temperature < 0.001:
            raise ConfigError(
                f"sampling.temperature is {self.temperature}: give 0 for greedy, or a positive number from 0.001 up."
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens cannot be sampled at all (top-p, top-k or greedy)."""
        return self.is_greedy or self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True)
class Request:
    """One completion asked of a rollout engine: token ids in, token ids out.

    Attributes:
        prompt_ids: Python integers, as engines take them; dropped when the engine has answered.
        seed: Seed of this request alone, so that its tokens do not depend on the other requests in the batch.
        max_new_tokens: Longest completion of this request, in tokens, where it is shorter than
            ``SamplingParams.max_new_tokens``.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    seed: int
    max_new_tokens: int | None = None

    def limit(self, sampling: SamplingParams) -> int:
        """Return the longest completion of this request, in tokens."""
        own = self.max_new_tokens
        return sampling.max_new_tokens if own is None else min(sampling.max_new_tokens, own)


@dataclass(frozen=True, eq=False)
class Completion(TokenRecord):
    """Tokens and logprobs that an engine returns for one request.

    ``logprobs[i]`` is the log-probability of ``token_ids[i]`` under the distribution that was *sampled*: after
    temperature, top-k and top-p (for greedy: under the untempered distribution, since the sampled one is a point).
    A completion that stopped includes its end token.

    An engine may give sequences of numbers: they become arrays here, once. What cannot become one is kept as it is, and
    the core's check of the engine's answer names it.

    Attributes:
        token_ids: int32 [n], read-only
        logprobs: float32 [n], read-only
        routed_experts: Experts that the engine's routers chose, an integer array [tokens of prompt and completion, L,
            k] by :class:`~rlplug.interfaces.RouterShape`: entry ``t`` is of the pass that read token ``t``. -1 where it
            is not known: the last token, which no pass has read, and what the engine did not record. ``None`` where a
            run replays no experts.
    """

    request_id: str
    token_ids: TokenIds
    logprobs: TokenFloats
    finish_reason: FinishReason
    policy_version: int
    routed_experts: np.ndarray[Any, Any] | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("token_ids", np.int32), ("logprobs", np.float32)):
            with suppress(ValueError):
                self.convert(**{name: dtype})
