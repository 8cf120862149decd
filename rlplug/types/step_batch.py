"""Completions end to end without padding: those of a step that one rank has, or some of them."""

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
from rlplug.types.samples import Sample
from rlplug.types.step_statistics import ONE_RANK, StepStatistics

Array = NDArray[Any]

NOT_TRAINED = ("input_ids", "response_mask", "routed_experts")
"""Arrays that a :class:`Batch` has in another form, or not at all."""


@dataclass(frozen=True)
class StepBatch:
    """The completions of a step that this rank generated: whole groups, by ascending group.

    Tokens stay here. The update sends each row to the rank that computes it; what that rank returns comes back here.

    B is the number of this rank's sequences, which may be 0, N that of their tokens, and K that of those that train.

    Attributes:
        lengths: int64 [B]: length of each sequence in tokens, prompt included
        per_sequence: Arrays [B] by the names of the fields of :class:`Batch`.
        per_token: Arrays [N]: int32 ``input_ids``, bool ``response_mask`` of the tokens that train, and others by the
            names of the fields of :class:`Batch`, which count where ``response_mask`` is true; int8 or int16 [N, L, k]
            ``routed_experts`` by which the engine read each token, -1 where they are not known, in a run that replays
            experts.
        step: Sums over all ranks' completions.
    """

    lengths: NDArray[np.int64]
    per_sequence: Mapping[str, Array]
    per_token: Mapping[str, Array]
    step: StepStatistics = ONE_RANK

    @staticmethod
    def from_samples(
        samples: Sequence[Sample], step: StepStatistics = ONE_RANK, no_experts: Array | None = None
    ) -> StepBatch:
        """Return samples as arrays. A sample of length 1 or with an empty completion is legal.

        Args:
            samples: This rank's samples, by ascending group.
            step: Sums over all ranks.
            no_experts: int8 or int16 [0, L, k]: routed experts of no tokens, in a run that replays experts.
        """

        def end_to_end(arrays: Sequence[Array], dtype: type) -> Array:
            return np.concatenate([np.empty(0, dtype), *arrays])

        lengths = np.array([len(s.token_ids) for s in samples], dtype=np.int64)
        trains = end_to_end([s.response_mask & (not s.errors) for s in samples], np.bool_)
        trains[(lengths.cumsum() - lengths)[lengths > 0]] = False  # nothing predicts a sequence's first token
        per_token = {
            "input_ids": end_to_end([s.token_ids for s in samples], np.int32),
            "response_mask": trains,
            "rollout_logprobs": end_to_end([s.rollout_logprobs for s in samples], np.float32),
            "policy_versions": end_to_end([s.policy_versions() for s in samples], np.int32),
        }
        if (experts := _experts_end_to_end(samples, no_experts)) is not None:
            per_token["routed_experts"] = experts
        return StepBatch(
            lengths=lengths,
            per_sequence={
                "rewards": np.array([0.0 if s.errors else s.trained_reward for s in samples], dtype=np.float32),
                "reward_valid": np.array([not s.errors for s in samples], dtype=np.bool_),
                "group_index": np.array([s.group for s in samples], dtype=np.int64),
                "truncated": np.array([s.finish_reason == "length" for s in samples], dtype=np.bool_),
            },
            per_token=per_token,
            step=step,
        )

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
        return joined.select(np.argsort(joined.per_sequence["group_index"], kind="stable"))

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
        """float32 [B], one number for all trainable tokens of a sequence, or [K]; ``None`` before there are any"""
        if "advantages" in self.per_sequence:
            return torch.from_numpy(self.per_sequence["advantages"])
        return self.tokens.advantages

    @functools.cached_property
    def num_tokens(self) -> Tensor:
        """int64 [B]: tokens of each sequence that train"""
        return torch.from_numpy(self.sums(self.per_token["response_mask"]))

    @functools.cached_property
    def tokens(self) -> Batch:
        """The tokens that train, as tensors on the CPU: for what reads single tokens."""
        trains = self.per_token["response_mask"]
        named: dict[str, Any] = {name: torch.from_numpy(values) for name, values in self.per_sequence.items()}
        for name, values in self.per_token.items():
            if name not in NOT_TRAINED:
                named[name] = torch.from_numpy(values[trains])
        index = torch.arange(self.num_sequences).repeat_interleave(self.num_tokens)
        if "advantages" in self.per_sequence:  # one number a sequence
            named["advantages"] = named["advantages"][index]
        token_ids = torch.from_numpy(self.per_token["input_ids"][trains].astype(np.int64))
        return Batch(num_tokens=self.num_tokens, sequence_index=index, token_ids=token_ids, **named)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Return a number a sequence, [B], for each of its tokens that train: [K]."""
        return per_sequence.repeat_interleave(self.num_tokens)

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

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> StepBatch:
        """Return some of the sequences, in the order of ``indices``."""
        rows = np.asarray(indices, dtype=np.int64)
        tokens = self.tokens_of(rows)
        return dataclasses.replace(
            self,
            lengths=self.lengths[rows],
            per_sequence={name: values[rows] for name, values in self.per_sequence.items()},
            per_token={name: values[tokens] for name, values in self.per_token.items()},
        )

    def tokens_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places among N of the tokens of some sequences, end to end."""
        lengths = self.lengths[rows]
        ends = lengths.cumsum()
        return np.arange(lengths.sum()) + np.repeat(self.ends[rows] - (ends - lengths), lengths)

    def replace(self, **changes: Tensor | None) -> StepBatch:
        """Return a copy with the named tensors replaced.

        Args:
            changes: By the names of the fields of :class:`Batch`: tensors [K], of the tokens that train, or [B] of a
                field that is one number a sequence; ``response_mask`` is bool [K], false for tokens that are to train
                no more. ``None`` removes a field.

        Raises:
            ValueError: A tensor has another shape; the message names it.
        """
        per_sequence, per_token = dict(self.per_sequence), dict(self.per_token)
        trains = self.per_token["response_mask"]
        for name, value in changes.items():
            wanted = self.num_sequences if name in per_sequence else int(self.num_tokens.sum())
            if value is None:
                per_sequence.pop(name, None)
                per_token.pop(name, None)
            elif list(value.shape) != [wanted]:
                what = "numbers of sequences" if name in per_sequence else "tokens that train"
                raise ValueError(f"{name} has the shape {list(value.shape)}, not [{wanted}]: this rank's {what}.")
            elif name in per_sequence:
                per_sequence[name] = value.detach().numpy()
            else:
                array = value.detach().numpy()
                per_token[name] = np.zeros(len(trains), array.dtype)
                per_token[name][trains] = array
        return dataclasses.replace(self, per_sequence=per_sequence, per_token=per_token)

    def with_tokens(self, **arrays: Tensor | None) -> StepBatch:
        """Return a copy with arrays [N], sequences end to end, in place of the named fields; ``None`` removes one."""
        named = {name: array.numpy() for name, array in arrays.items() if array is not None}
        kept = {name: array for name, array in self.per_token.items() if name not in arrays}
        return dataclasses.replace(self, per_token=kept | named)

    def with_advantages(self, per_sequence: Tensor) -> StepBatch:
        """Return a copy with one advantage for all tokens of a sequence, float32 [B]."""
        cleared = self.replace(advantages=None)
        return dataclasses.replace(
            cleared, per_sequence={**cleared.per_sequence, "advantages": per_sequence.detach().numpy()}
        )


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
