"""Samples as padded tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Sequences as tensors, right-padded to ``[B, T]``: a micro-batch, or what a rank has of a step.

    Attributes:
        input_ids: int64 [B, T]: token ids of prompt and completion
        attention_mask: bool [B, T]: real tokens
        response_mask: bool [B, T]: tokens that train; false everywhere in a sequence whose reward failed
        rollout_logprobs: float32 [B, T]: logprobs that the engine returned
        rewards: float32 [B]: 0 where ``reward_valid`` is false
        reward_valid: bool [B]: sequences of which no reward failed
        group_index: int64 [B]: equal for completions of one prompt
        truncated: bool [B]: sequences that a limit of tokens or turns cut (finish reason ``length``)
        policy_versions: int32 [B, T]: version of the policy that produced the token; -1 where none did
        old_logprobs: float32 [B, T]: the trainer's logprobs at the start of the update; ``None`` in an exactly
            on-policy step
        ref_logprobs: float32 [B, T]: logprobs of the reference policy
        values: float32 [B, T]: values of the critic
        advantages: float32 [B, T]
        returns: float32 [B, T]: targets of the critic
        routed_experts: int8 or int16 [N, L, k], N real tokens of all sequences end to end: experts by which the engine
            read each token, -1 where they are not known; ``None`` where a run replays no experts
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    rollout_logprobs: Tensor
    rewards: Tensor
    reward_valid: Tensor
    group_index: Tensor
    truncated: Tensor
    policy_versions: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    routed_experts: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return self.input_ids.shape[0]

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Length of each sequence in tokens, prompt included; do not change the list."""
        lengths: list[int] = self.attention_mask.numpy().sum(axis=1).tolist()
        return lengths

    def replace(self, **changes: Tensor | None) -> Batch:
        """Return a copy with the named tensors replaced."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are present, by name."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with ``function`` applied to each tensor."""
        changed: Any = {name: function(tensor) for name, tensor in self.tensors().items()}
        return dataclasses.replace(self, **changed)
