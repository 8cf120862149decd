"""The completions of a step that one rank has, end to end without padding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplug.types.batch import Batch
from rlplug.types.completions import NO_VERSION
from rlplug.types.samples import Sample
from rlplug.types.step_statistics import ONE_RANK, StepStatistics

Array = NDArray[Any]

PADDED_DTYPES = {"input_ids": np.int64}
"""Dtypes of padded tensors where they differ from those without padding."""
NUMBER_OR_TOKENS = ("advantages", "response_mask")
"""Fields that may be replaced by one number a sequence."""


@dataclass(frozen=True)
class StepBatch:
    """The completions of a step that this rank generated: whole groups, by ascending group.

    Tokens stay here. The update sends each row to the rank that computes it; what that rank returns comes back here.

    B is the number of this rank's sequences, which may be 0, and N that of their tokens.

    Attributes:
        lengths: int64 [B]: length of each sequence in tokens, prompt included
        per_sequence: Arrays [B] by the names of the fields of :class:`Batch`.
        per_token: Arrays [N], or [N, L, k] of routed experts, by the names of the fields of :class:`Batch`.
        step: Sums over all ranks' completions.
    """

    lengths: NDArray[np.int64]
    per_sequence: Mapping[str, Array]
    per_token: Mapping[str, Array]
    pad_token_id: int
    step: StepStatistics = ONE_RANK

    @staticmethod
    def from_samples(
        samples: Sequence[Sample],
        pad_token_id: int,
        step: StepStatistics = ONE_RANK,
        no_experts: Array | None = None,
    ) -> StepBatch:
        """Return samples as arrays. A sample of length 1 or with an empty completion is legal.

        Args:
            samples: This rank's samples, by ascending group.
            pad_token_id: Token id of the padding of micro-batches.
            step: Sums over all ranks.
            no_experts: int8 or int16 [0, L, k]: routed experts of no tokens, in a run that replays experts.
        """

        def end_to_end(arrays: Sequence[Array], dtype: type) -> Array:
            return np.concatenate([np.empty(0, dtype), *arrays])

        per_token = {
            "input_ids": end_to_end([s.token_ids for s in samples], np.int32),
            "response_mask": end_to_end([s.response_mask & (not s.errors) for s in samples], np.bool_),
            "rollout_logprobs": end_to_end([s.rollout_logprobs for s in samples], np.float32),
            "policy_versions": end_to_end([s.policy_versions() for s in samples], np.int32),
        }
        if (experts := _experts_end_to_end(samples, no_experts)) is not None:
            per_token["routed_experts"] = experts
        return StepBatch(
            lengths=np.array([len(s.token_ids) for s in samples], dtype=np.int64),
            per_sequence={
                "rewards": np.array([0.0 if s.errors else s.reward for s in samples], dtype=np.float32),
                "reward_valid": np.array([not s.errors for s in samples], dtype=np.bool_),
                "group_index": np.array([s.group for s in samples], dtype=np.int64),
                "truncated": np.array([s.finish_reason == "length" for s in samples], dtype=np.bool_),
            },
            per_token=per_token,
            pad_token_id=pad_token_id,
            step=step,
        )

    @staticmethod
    def from_padded(batch: Batch, step: StepStatistics = ONE_RANK) -> StepBatch:
        """Return the rows of a padded batch on the CPU."""
        real = batch.attention_mask.numpy()
        per_sequence, per_token = {}, {}
        for name, tensor in batch.tensors().items():
            if name == "routed_experts":  # end to end already
                per_token[name] = tensor.numpy()
            elif tensor.dim() == 1:
                per_sequence[name] = tensor.numpy()
            elif name != "attention_mask":
                per_token[name] = tensor.numpy()[real]
        return StepBatch(real.sum(axis=1), per_sequence, per_token, pad_token_id=0, step=step)

    @staticmethod
    def join(parts: Sequence[StepBatch]) -> StepBatch:
        """Return the rows of some parts of a step by ascending group.

        Args:
            parts: At least one; with the same fields, and no group in two of them.
        """

        def end_to_end(fields: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
            return {name: np.concatenate([part[name] for part in fields]) for name in fields[0]}

        joined = dataclasses.replace(
            parts[0],
            lengths=np.concatenate([part.lengths for part in parts]),
            per_sequence=end_to_end([part.per_sequence for part in parts]),
            per_token=end_to_end([part.per_token for part in parts]),
        )
        order = np.argsort(joined.per_sequence["group_index"], kind="stable")
        return dataclasses.replace(
            joined,
            lengths=joined.lengths[order],
            per_sequence={name: values[order] for name, values in joined.per_sequence.items()},
            per_token={
                name: joined.rows_end_to_end(values, order.tolist()) for name, values in joined.per_token.items()
            },
        )

    # ---- what algorithms read ---------------------------------------------------------------------------------------

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def rewards(self) -> Tensor:
        """float32 [B]: 0 where ``reward_valid`` is false"""
        return torch.from_numpy(self.per_sequence["rewards"])

    @property
    def reward_valid(self) -> Tensor:
        """bool [B]: sequences of which no reward failed"""
        return torch.from_numpy(self.per_sequence["reward_valid"])

    @property
    def group_index(self) -> Tensor:
        """int64 [B]: equal for completions of one prompt, all of which are here"""
        return torch.from_numpy(self.per_sequence["group_index"])

    @property
    def truncated(self) -> Tensor:
        """bool [B]: sequences that a limit of tokens or turns cut (finish reason ``length``)"""
        return torch.from_numpy(self.per_sequence["truncated"])

    @property
    def advantages(self) -> Tensor | None:
        """float32 [B], one number for all trainable tokens of a sequence, or [B, T]; ``None`` before there are any"""
        if "advantages" in self.per_sequence:
            return torch.from_numpy(self.per_sequence["advantages"])
        return self.padded.advantages if "advantages" in self.per_token else None

    @functools.cached_property
    def num_tokens(self) -> Tensor:
        """int64 [B]: tokens of each sequence that train"""
        return torch.from_numpy(self.sums(self.per_token["response_mask"]))

    @functools.cached_property
    def padded(self) -> Batch:
        """All of the rank's sequences as tensors [B, T], made at the first use: for what reads single tokens."""
        return self.select(range(self.num_sequences))

    # ---- rows -------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def ends(self) -> NDArray[np.int64]:
        """int64 [B + 1]: where each sequence starts among the tokens, and the end of the last one."""
        return np.concatenate([[0], self.lengths.cumsum()])

    def sums(self, values: Array) -> Array:
        """Return the sum over each sequence, [B], of ``values``, an array [N]: int64, or float64 of floats."""
        dtype = np.float64 if values.dtype.kind == "f" else np.int64
        if not len(values):
            return np.zeros(self.num_sequences, dtype)
        found = np.add.reduceat(values, np.minimum(self.ends[:-1], len(values) - 1), dtype=dtype)
        return np.where(self.lengths > 0, found, 0)

    def select(self, indices: Sequence[int]) -> Batch:
        """Return some of the sequences as tensors on the CPU, padded on the right to the longest of them."""
        rows = np.asarray(indices, dtype=np.int64)
        lengths, starts = self.lengths[rows], self.ends[rows]
        shape = (len(rows), int(lengths.max(initial=1)))
        real = np.arange(shape[1]) < lengths[:, None]

        def padded(name: str, values: Array) -> Tensor:
            dtype = PADDED_DTYPES.get(name, values.dtype)
            value = {"input_ids": self.pad_token_id, "policy_versions": NO_VERSION}.get(name, 0)
            filled = np.full(shape, value, dtype) if value else np.zeros(shape, dtype)
            for row, start, length in zip(filled, starts, lengths, strict=True):
                row[:length] = values[start : start + length]
            return torch.from_numpy(filled)

        experts = self.per_token.get("routed_experts")
        tokens: dict[str, Any] = {n: padded(n, v) for n, v in self.per_token.items() if n != "routed_experts"}
        tokens |= {name: torch.from_numpy(values[rows]) for name, values in self.per_sequence.items()}
        if "advantages" in self.per_sequence:  # one number a sequence
            tokens["advantages"] = torch.where(tokens["response_mask"], tokens["advantages"][:, None], 0.0)
        if experts is not None:
            parts = [experts[start : start + length] for start, length in zip(starts, lengths, strict=True)]
            tokens["routed_experts"] = torch.from_numpy(np.concatenate([experts[:0], *parts]))
        return Batch(attention_mask=torch.from_numpy(real), **tokens)

    def rows_end_to_end(self, values: Array, indices: Sequence[int]) -> Array:
        """Return those of ``values``, an array [N, ...], that belong to some sequences, in their order."""
        return np.concatenate([values[:0], *(values[self.ends[row] : self.ends[row + 1]] for row in indices)])

    def replace(self, **changes: Tensor | None) -> StepBatch:
        """Return a copy with the named tensors replaced.

        Args:
            changes: By the names of the fields of :class:`Batch`: tensors [B, T] as in ``padded``, or [B]. A number a
                sequence as ``advantages`` stands for all of its tokens that train; false a sequence as
                ``response_mask`` keeps all of its tokens from training. ``None`` removes a field.
        """
        per_sequence, per_token = dict(self.per_sequence), dict(self.per_token)
        for name, value in changes.items():
            if value is None or name == "advantages":
                per_sequence.pop(name, None)
                per_token.pop(name, None)
            if value is None:
                continue
            array = self._checked(name, value.detach()).numpy()
            if array.ndim == 2:
                per_token[name] = array[self._real(array.shape[1])]
            elif name == "response_mask":
                per_token[name] = self.per_token[name] & np.repeat(array, self.lengths)
            else:
                per_sequence[name] = array
        return dataclasses.replace(self, per_sequence=per_sequence, per_token=per_token)

    def with_tokens(self, **arrays: Tensor | None) -> StepBatch:
        """Return a copy with arrays [N], sequences end to end, in place of the named fields; ``None`` removes one."""
        named = {name: array.numpy() for name, array in arrays.items() if array is not None}
        kept = {name: array for name, array in self.per_token.items() if name not in arrays}
        return dataclasses.replace(self, per_token=kept | named)

    def _real(self, width: int) -> NDArray[np.bool_]:
        """Return which places of ``padded`` have a token, bool [B, T]."""
        return np.arange(width) < self.lengths[:, None]

    def _checked(self, name: str, value: Tensor) -> Tensor:
        shapes = [[self.num_sequences]] if name in self.per_sequence or name in NUMBER_OR_TOKENS else []
        if name not in self.per_sequence or name in NUMBER_OR_TOKENS:
            shapes.append([self.num_sequences, int(self.lengths.max(initial=1))])
        if list(value.shape) not in shapes:
            wanted = " or ".join(map(str, shapes))
            raise ValueError(f"{name} has the shape {list(value.shape)}, not {wanted}, of this rank's sequences.")
        return value


def _experts_end_to_end(samples: Sequence[Sample], no_experts: Array | None) -> Array | None:
    """Return the experts of all samples joined, or ``None`` in a run that replays none.

    A sample without any gets -1: a run that resumes with router replay may have begun it without.
    """
    known = next((s.routed_experts[:0] for s in samples if s.routed_experts is not None), no_experts)
    if known is None:
        return None
    parts = [
        np.full((len(s.token_ids), *known.shape[1:]), -1, known.dtype) if s.routed_experts is None else s.routed_experts
        for s in samples
    ]
    return np.concatenate([known, *parts])
