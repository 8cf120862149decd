"""The tokens that train, end to end without padding: what algorithms and losses compute with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """The trainable tokens of some sequences, end to end: of a micro-batch, or of what a rank has of a step.

    B sequences, K trainable tokens: those of the first sequence in their order, then those of the second. A sequence
    may have none. Tokens of prompts and of an environment are not here.

    Attributes:
        num_tokens: int64 [B]: trainable tokens of each sequence
        sequence_index: int64 [K]: sequence of each token, ascending
        token_ids: int64 [K]
        rollout_logprobs: float32 [K]: logprobs that the engine returned
        rewards: float32 [B]: 0 where ``reward_valid`` is false
        reward_valid: bool [B]: sequences of which no reward failed; the others have no trainable token
        group_index: int64 [B]: equal for completions of one prompt
        truncated: bool [B]: sequences that a limit of tokens or turns cut (finish reason ``length``)
        policy_versions: int32 [K]: version of the policy that produced the token
        old_logprobs: float32 [K]: the trainer's logprobs at the start of the update; ``None`` in an exactly on-policy
            step
        ref_logprobs: float32 [K]: logprobs of the reference policy
        values: float32 [K]: values of the critic, each of the state before its token
        advantages: float32 [K]
        returns: float32 [K]: targets of the critic
    """

    num_tokens: Tensor
    sequence_index: Tensor
    token_ids: Tensor
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

    @property
    def num_sequences(self) -> int:
        return len(self.num_tokens)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Return a number a sequence, [B], for each of its tokens: [K]."""
        return per_sequence[self.sequence_index]

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of float ``values`` [K] over each sequence, [B]; 0 of no tokens. It passes gradients on.

        Sums are in the order of tokens, so that they repeat on a GPU too.
        """
        if not len(values):
            return values.sum().expand(self.num_sequences)
        return torch.segment_reduce(values, "sum", lengths=self.num_tokens, unsafe=True, initial=0)

    def padded(self, values: Tensor, fill: float = 0) -> Tensor:
        """Return ``values`` [K] as a grid [B, L], L the most tokens of a sequence, for what works on rows.

        It reads L, for which a GPU is waited for, and takes B x L entries, however short most sequences are.

        Args:
            values: Of any dtype.
            fill: What stands behind a sequence's last token.
        """
        shape = self.num_sequences, int(self.num_tokens.max()) if self.num_sequences else 0
        starts = self.num_tokens.cumsum(0) - self.num_tokens
        places = torch.arange(len(values), device=values.device) - starts[self.sequence_index]
        grid = values.new_full(shape, fill)
        return grid.index_put((self.sequence_index, places), values)

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
