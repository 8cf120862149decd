"""Samples as padded tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplug.types.completions import NO_VERSION
from rlplug.types.samples import Sample


@dataclass(frozen=True)
class Batch:
    """The tensors of a step or of a micro-batch, right-padded to ``[B, T]``.

    Every rank holds the whole step's batch on the CPU and moves its own micro-batches to the device, so that
    advantages, denominators and selections never depend on how the work is split.
    """

    input_ids: Tensor
    """int64 [B, T]: token ids of prompt and completion"""
    attention_mask: Tensor
    """bool [B, T]: real tokens"""
    response_mask: Tensor
    """bool [B, T]: tokens that train; false everywhere in a sequence whose reward failed"""
    rollout_logprobs: Tensor
    """float32 [B, T]: logprobs that the engine returned"""
    rewards: Tensor
    """float32 [B]: 0 where ``reward_valid`` is false"""
    reward_valid: Tensor
    """bool [B]: sequences of which no reward failed"""
    group_index: Tensor
    """int64 [B]: equal for completions of one prompt"""
    truncated: Tensor
    """bool [B]: sequences that a limit of tokens or turns cut (finish reason ``length``)"""
    policy_versions: Tensor | None = None
    """int32 [B, T]: version of the policy that produced the token; -1 where none did"""
    old_logprobs: Tensor | None = None
    """float32 [B, T]: the trainer's logprobs at the start of the update; ``None`` in an exactly on-policy step"""
    ref_logprobs: Tensor | None = None
    """float32 [B, T]: logprobs of the reference policy"""
    values: Tensor | None = None
    """float32 [B, T]: values of the critic"""
    advantages: Tensor | None = None
    """float32 [B, T]"""
    returns: Tensor | None = None
    """float32 [B, T]: targets of the critic"""
    routed_experts: Tensor | None = None
    """int8 or int16 [N, L, k], N real tokens of all sequences end to end: experts by which the engine read each token,
    -1 where they are not known; ``None`` where a run replays no experts"""

    @staticmethod
    def from_samples(samples: Sequence[Sample], pad_token_id: int) -> Batch:
        """Return samples as tensors, padded on the right. A sample of length 1 or with an empty completion is legal."""
        lengths = np.array([len(sample.token_ids) for sample in samples])
        longest = int(lengths.max())

        def padded(sequences: Iterable[NDArray[Any]], value: Any, dtype: type) -> Tensor:
            shape = (len(samples), longest)  # zeros take no memory before they are written
            filled: NDArray[Any] = np.full(shape, value, dtype) if value else np.zeros(shape, dtype)
            for row, sequence in zip(filled, sequences, strict=True):
                row[: len(sequence)] = sequence
            return torch.from_numpy(filled)

        valid = torch.tensor([not sample.errors for sample in samples])
        return Batch(
            input_ids=padded((s.token_ids for s in samples), pad_token_id, np.int64),
            attention_mask=torch.from_numpy(np.arange(longest) < lengths[:, None]),
            response_mask=padded((s.response_mask & (not s.errors) for s in samples), False, np.bool_),
            rollout_logprobs=padded((s.rollout_logprobs for s in samples), 0.0, np.float32),
            rewards=torch.tensor([0.0 if s.errors else s.reward for s in samples], dtype=torch.float32),
            reward_valid=valid,
            group_index=torch.tensor([s.group for s in samples], dtype=torch.int64),
            truncated=torch.tensor([s.finish_reason == "length" for s in samples]),
            policy_versions=padded((s.policy_versions() for s in samples), NO_VERSION, np.int32),
            routed_experts=_experts_end_to_end(samples),
        )

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

    def select(self, indices: Sequence[int]) -> Batch:
        """Return the sequences at ``indices`` of a batch on the CPU, cut to the longest of them."""
        row_indices = np.array(indices, dtype=np.int64)  # numpy: see rlplug.models.packing.pack
        lengths = self.attention_mask.numpy().sum(axis=1)
        longest = int(lengths[row_indices].max())

        def take(tensor: Tensor) -> Tensor:
            array = tensor.numpy()
            return torch.from_numpy(array[row_indices, :longest] if tensor.dim() == 2 else array[row_indices])

        if self.routed_experts is None:
            return self.map(take)
        ends = lengths.cumsum()
        parts = [self.routed_experts.numpy()[ends[row] - lengths[row] : ends[row]] for row in row_indices]
        experts = torch.from_numpy(np.concatenate(parts))
        return self.replace(routed_experts=None).map(take).replace(routed_experts=experts)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are present, by name."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with ``function`` applied to each tensor."""
        changed: Any = {name: function(tensor) for name, tensor in self.tensors().items()}
        return dataclasses.replace(self, **changed)


def _experts_end_to_end(samples: Sequence[Sample]) -> Tensor | None:
    """Return the experts of all samples joined, or ``None`` where there are none.

    A sample without any gets -1: a run that resumes with router replay may have begun it without.
    """
    known = next((sample.routed_experts for sample in samples if sample.routed_experts is not None), None)
    if known is None:
        return None
    unknown = np.full_like(known[:1], -1)
    parts = [
        np.repeat(unknown, len(s.token_ids), axis=0) if s.routed_experts is None else s.routed_experts for s in samples
    ]
    return torch.from_numpy(np.concatenate(parts))
