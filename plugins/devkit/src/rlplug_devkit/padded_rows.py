"""Sequences as padded tensors [B, T], for references and oracles that compute row by row, and their flat form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlplug.types import ONE_RANK, Batch, StepBatch, StepStatistics


@dataclass(frozen=True)
class PaddedRows:
    """Sequences as tensors, right-padded to ``[B, T]``, prompts included.

    Tensors have the names and dtypes of :class:`rlplug.types.Batch`; those [K] there are [B, T] here, and entry
    ``[b, t]`` speaks of token ``t``.

    Attributes:
        input_ids: int64 [B, T]
        attention_mask: bool [B, T]: real tokens
        response_mask: bool [B, T]: tokens that train
        routed_experts: int8 or int16 [N, L, k], of the N real tokens end to end
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

    @staticmethod
    def of(batch: StepBatch) -> PaddedRows:
        """Return the sequences of ``batch``, padded with 0."""
        real = torch.from_numpy(np.arange(int(batch.lengths.max(initial=1))) < batch.lengths[:, None])
        tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in batch.per_sequence.items()}
        for name, array in batch.per_token.items():
            values = torch.from_numpy(array)
            if name != "routed_experts":
                values = values.new_zeros(real.shape).masked_scatter(real, values)
            tensors[name] = values.long() if name == "input_ids" else values
        if "advantages" in batch.per_sequence:  # one number a sequence
            tensors["advantages"] = torch.where(tensors["response_mask"], tensors["advantages"][:, None], 0.0)
        return PaddedRows(attention_mask=real, **tensors)

    def flat(self, step: StepStatistics = ONE_RANK) -> StepBatch:
        """Return the sequences end to end."""
        real = self.attention_mask.numpy()
        per_sequence, per_token = {}, {}
        for name, tensor in self.tensors().items():
            if name == "routed_experts":
                per_token[name] = tensor.numpy()
            elif tensor.dim() == 1:
                per_sequence[name] = tensor.numpy()
            elif name != "attention_mask":
                per_token[name] = tensor.detach().numpy()[real]
        per_token["input_ids"] = per_token["input_ids"].astype(np.int32)
        return StepBatch(real.sum(axis=1), per_sequence, per_token, step)

    @property
    def tokens(self) -> Batch:
        """The tokens that train."""
        return self.flat().tokens

    def trained(self, grid: Tensor) -> Tensor:
        """Return the entries of ``grid`` [B, T] of the tokens that train, [K], with their gradient."""
        return grid[self.response_mask.to(grid.device)]

    def grid(self, values: Tensor) -> Tensor:
        """Return ``values`` [K] of the tokens that train as [B, T], 0 elsewhere, with their gradient."""
        return values.new_zeros(self.response_mask.shape).masked_scatter(self.response_mask.to(values.device), values)

    @property
    def num_sequences(self) -> int:
        return len(self.input_ids)

    @property
    def lengths(self) -> list[int]:
        """Length of each sequence in tokens, prompt included."""
        lengths: list[int] = self.attention_mask.sum(dim=1).tolist()
        return lengths

    def select(self, rows: Any) -> PaddedRows:
        """Return some of the sequences, padded to the longest of them."""
        return PaddedRows.of(self.flat().select(rows))

    def replace(self, **changes: Tensor | None) -> PaddedRows:
        """Return a copy with the named tensors replaced."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are present, by name."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def map(self, function: Callable[[Tensor], Tensor]) -> PaddedRows:
        """Return the rows with ``function`` applied to each tensor."""
        changed: Any = {name: function(tensor) for name, tensor in self.tensors().items()}
        return dataclasses.replace(self, **changed)
