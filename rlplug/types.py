"""The vocabulary of rlplug: frozen records that pass between the phases of a step.

Shape legend, used in every docstring:
    B  sequences (completions) in a batch
    T  tokens of the longest sequence in that batch, prompt included
    K  positions for which logits are computed
    V  vocabulary

Per-token tensors are aligned with ``input_ids``: entry ``[b, t]`` speaks of token ``t``, so ``logprobs[b, t]`` is
``log p(input_ids[b, t] | input_ids[b, :t])`` and ``logprobs[:, 0]`` is 0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplug.errors import ConfigError
from rlplug.token_arrays import TokenFloats, TokenIds, TokenMask, TokenRecord, read_only

GIB: Final = 1 << 30
"""Bytes of a GiB."""

NO_VERSION: Final = -1
"""Policy version of a token that no policy produced, and of an engine without weights."""

ENVIRONMENT: Final = "environment"
"""Name of the environment's own reward among a sample's rewards."""

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""Reason why a completion ended: an end token (``stop``), ``max_new_tokens`` (``length``) or ``abort``."""


@dataclass(frozen=True)
class Prompt:
    """One task for the policy, tokenised once: all phases of a step work on ``token_ids``."""

    uid: str
    """Stable name within its source, such as ``train.jsonl:17``."""
    token_ids: tuple[int, ...]
    text: str
    """Text of the tokens: the rendered chat template, or the plain prompt."""
    answer: Any = None
    """Reference answer for verifiers; ``None`` when the task has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options. The defaults sample from the policy's own distribution.

    Args:
        max_new_tokens: Longest completion, in tokens.
        temperature: Divides the logits before sampling; 0 means greedy.
        top_p: Keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: Keep this many tokens; 0 keeps all.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"sampling.max_new_tokens is {self.max_new_tokens}: give at least 1.")
        if not (self.temperature == 0 or self.temperature >= 0.001):
            raise ConfigError(
                f"sampling.temperature is {self.temperature}: give 0 for greedy, or a positive number from 0.001 up."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling.top_p is {self.top_p}: give a share above 0, up to 1 (1 keeps all tokens).")
        if self.top_k < 0:
            raise ConfigError(f"sampling.top_k is {self.top_k}: give 0 to keep all tokens, or a positive count.")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens cannot be sampled at all (top-p, top-k or greedy)."""
        return self.is_greedy or self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True)
class Request:
    """One completion asked of a rollout engine: token ids in, token ids out."""

    request_id: str
    prompt_ids: tuple[int, ...]
    """Python integers, as engines take them; dropped when the engine has answered."""
    seed: int
    """Seed of this request alone, so that its tokens do not depend on the other requests in the batch."""
    max_new_tokens: int | None = None
    """Longest completion of this request, in tokens, where it is shorter than ``SamplingParams.max_new_tokens``."""

    def limit(self, sampling: SamplingParams) -> int:
        """Return the longest completion of this request, in tokens."""
        return min(sampling.max_new_tokens, self.max_new_tokens or sampling.max_new_tokens)


@dataclass(frozen=True, eq=False)
class Completion(TokenRecord):
    """Tokens and logprobs that an engine returns for one request.

    ``logprobs[i]`` is the log-probability of ``token_ids[i]`` under the distribution that was *sampled*: after
    temperature, top-k and top-p (for greedy: under the untempered distribution, since the sampled one is a point).
    A completion that stopped includes its end token.

    An engine may give sequences of numbers: they become arrays here, once. What cannot become one is kept as it is, and
    the core's check of the engine's answer names it.
    """

    request_id: str
    token_ids: TokenIds
    """int32 [n], read-only"""
    logprobs: TokenFloats
    """float32 [n], read-only"""
    finish_reason: FinishReason
    policy_version: int
    routed_experts: np.ndarray[Any, Any] | None = None
    """Experts that the engine's routers chose, an integer array [tokens of prompt and completion, L, k] by
    :class:`~rlplug.interfaces.RouterShape`: entry ``t`` is of the pass that read token ``t``. -1 where it is not known:
    the last token, which no pass has read, and what the engine did not record. ``None`` where a run replays no
    experts."""

    def __post_init__(self) -> None:
        for name, dtype in (("token_ids", np.int32), ("logprobs", np.float32)):
            with suppress(ValueError):
                self.convert(**{name: dtype})


@dataclass(frozen=True)
class Segment:
    """Tokens of a trajectory that an engine returned at once, with one version of the policy."""

    start: int
    """Index of the first token in the trajectory's ``token_ids``, which begin with the prompt."""
    end: int
    """Index one past the last token."""
    policy_version: int
    ends_turn: bool
    """Whether the turn ends with this segment; false where the next segment continues it."""


@dataclass(frozen=True)
class RewardError:
    """A reward that could not be computed. It is counted and excluded from the advantage, never read as 0."""

    message: str


@dataclass(frozen=True, eq=False)
class Sample(TokenRecord):
    """One trajectory: the token ids of prompt and completion, of which the policy produced those of ``response_mask``.

    Sequences that are given for the arrays become arrays.
    """

    prompt: Prompt
    group: int
    """Index of the group: the same number for all samples of one prompt in one step."""
    token_ids: TokenIds
    """int32 [n], read-only: token ids of prompt and completion."""
    response_mask: TokenMask
    """bool [n], read-only: true where the policy produced the token."""
    rollout_logprobs: TokenFloats
    """float32 [n], read-only: the engine's logprobs, 0 where ``response_mask`` is false."""
    completion: str
    """Text after the prompt, observations of the environment included; only rewards and logs read it."""
    finish_reason: FinishReason
    """Finish reason of the trajectory: ``length`` where a limit of tokens or turns cut it."""
    policy_version: int
    """Version of the policy that produced the oldest tokens."""
    segments: tuple[Segment, ...] = ()
    """Segments that the engine returned, in order; only one for a completion of a single turn."""
    routed_experts: np.ndarray[Any, Any] | None = None
    """int8 or int16 [tokens, L, k]: experts by which the engine read each token, -1 where they are not known; ``None``
    where a run replays no experts."""
    last_turn: str = ""
    """Text of the policy's last turn: the whole completion when there is a single turn."""
    rewards: Mapping[str, float | RewardError] = field(default_factory=dict)
    """Unweighted value of each reward, by name. Before the rewards phase, only an environment's own reward is in it."""
    reward: float = 0.0
    """Weighted sum of ``rewards``; meaningless when ``errors`` is not empty."""

    def __post_init__(self) -> None:
        self.convert(token_ids=np.int32, response_mask=np.bool_, rollout_logprobs=np.float32)

    @property
    def errors(self) -> dict[str, RewardError]:
        return {name: value for name, value in self.rewards.items() if isinstance(value, RewardError)}

    @property
    def num_response_tokens(self) -> int:
        return int(np.count_nonzero(self.response_mask))

    def policy_versions(self) -> NDArray[np.int32]:
        """Return the version that produced each token, int32 [n]; ``NO_VERSION`` for prompt and observations."""
        versions = np.where(self.response_mask, np.int32(self.policy_version), np.int32(NO_VERSION))
        for segment in self.segments:
            versions[segment.start : segment.end] = segment.policy_version
        return read_only(versions)

    @property
    def num_turns(self) -> int:
        return sum(segment.ends_turn for segment in self.segments)


@dataclass(frozen=True)
class Rollout:
    """The scored samples of a step, the same on every rank; groups are contiguous."""

    samples: tuple[Sample, ...] = ()
    """Samples that train."""
    rejected: tuple[Sample, ...] = ()
    """Samples that the algorithm did not select."""
    surplus: tuple[Sample, ...] = ()
    """Samples of groups that a step generates beyond what it trains on; the algorithm does not see them."""

    def groups(self) -> list[tuple[Sample, ...]]:
        """Return the samples of each prompt, in order."""
        by_group: dict[int, list[Sample]] = {}
        for sample in self.samples:
            by_group.setdefault(sample.group, []).append(sample)
        return [tuple(group) for group in by_group.values()]

    @property
    def drawn(self) -> tuple[Sample, ...]:
        """All samples: those that train, the rejected and the surplus."""
        return self.samples + self.rejected + self.surplus

    @property
    def num_groups(self) -> int:
        """Number of prompts with samples that train."""
        return len({sample.group for sample in self.samples})

    @property
    def num_drawn(self) -> int:
        """Number of prompts with samples of any kind."""
        return len({sample.group for sample in self.drawn})

    def with_group(self, group: Sequence[Sample], chosen: Sequence[Sample]) -> Rollout:
        """Return the rollout with one more group, of which ``chosen`` train."""
        rejected = tuple(sample for sample in group if not any(sample is other for other in chosen))
        return dataclasses.replace(self, samples=self.samples + tuple(chosen), rejected=self.rejected + rejected)

    def with_surplus(self, group: Sequence[Sample]) -> Rollout:
        """Return the rollout with one more surplus group."""
        return dataclasses.replace(self, surplus=self.surplus + tuple(group))


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


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each axis of the mesh, outermost first."""

    replicate: int
    shard: int
    sequence: int
    tensor: int

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.sequence * self.tensor

    @property
    def data_size(self) -> int:
        """Number of parts into which the rows of a batch are divided."""
        return self.replicate * self.shard

    @classmethod
    def from_world(cls, world_size: int, replicate: int, sequence: int, tensor: int) -> MeshSizes:
        """Return the sizes for ``world_size`` ranks: the shard axis takes the factor that the other axes leave.

        Raises:
            ConfigError: A size is below 1, or does not divide the ranks that are left.
        """
        left = world_size
        for name, size in (("tensor", tensor), ("sequence", sequence), ("replicate", replicate)):
            if size < 1 or left % size:
                others = "" if left == world_size else f" ({world_size} ranks in all, the rest by the other axes)"
                raise ConfigError(
                    f"trainer.strategy.init_args.{name} is {size}, which does not divide {left} ranks{others}: give a "
                    "divisor, or change trainer.devices."
                )
            left //= size
        return cls(replicate, left, sequence, tensor)
