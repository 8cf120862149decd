"""The algorithm seam: what a paper adds to the loop, as pure functions on tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlplug.types import Batch, Sample


@dataclass(frozen=True)
class Needs:
    """What the loop must prepare for an algorithm; anything not asked for is not computed."""

    groups: bool = False
    """Several completions per prompt to compare: ``group_size`` of at least 2."""
    old_logprobs: bool = False
    """``batch.old_logprobs`` before :meth:`Algorithm.advantages`, on-policy steps included."""
    reference_policy: bool = False
    """A frozen copy of the initial policy, and ``batch.ref_logprobs``."""
    rollout_logprobs: bool = False
    """An engine that returns logprobs of its own."""
    critic: bool = False
    """``batch.values``, and a critic trained by :meth:`Algorithm.value_loss`."""
    entropy_gradient: bool = False
    """Entropy with its gradient; without this it is a metric only."""


@dataclass(frozen=True)
class RunInfo:
    """What an algorithm is told of a run before it starts."""

    num_completions: int
    """Completions of one step, over all ranks."""
    group_size: int
    """Completions per prompt."""
    max_new_tokens: int
    """Longest completion, in tokens."""
    fp8_rollout: bool = False
    """Whether the engine calculates with weights in FP8, and the trainer does not."""


@dataclass(frozen=True)
class Denominators:
    """Global counts of one mini-batch, over all ranks and micro-batches.

    A loss divides its sums by these, never by a count of its own micro-batch: then adding up the losses of all
    micro-batches on all ranks gives the same loss and gradients whatever the split.
    """

    num_tokens: int
    """Trainable tokens (``response_mask``)."""
    num_sequences: int
    """Sequences with at least one trainable token."""


@dataclass(frozen=True)
class Advantages:
    """The result of :meth:`Algorithm.advantages`."""

    advantages: Tensor
    """float32 [B, T], 0 where ``response_mask`` is false"""
    returns: Tensor | None = None
    """float32 [B, T]: the critic's target"""
    response_mask: Tensor | None = None
    """bool [B, T]: takes the place of ``batch.response_mask``, to train on fewer tokens; ``None`` leaves it"""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LossOutput:
    """The result of :meth:`Algorithm.loss` for one micro-batch. All tensors are float32 scalars."""

    loss: Tensor
    """This micro-batch's *share* of the mini-batch's loss."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Shares like the loss: the loop adds them over micro-batches and ranks."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """The loop takes the largest over micro-batches, ranks and optimizer steps."""
    minima: dict[str, Tensor] = field(default_factory=dict)
    """The loop takes the smallest."""


class Algorithm(ABC):
    """Advantages, a loss, and optionally a choice among samples. No trainer inside."""

    @property
    def needs(self) -> Needs:
        """What the loop must prepare. The default asks for nothing."""
        return Needs()

    @property
    def max_refills(self) -> int:
        """How many more rounds of prompts a step may draw to replace groups that :meth:`select` left empty."""
        return 0

    @property
    def over_sampling(self) -> float:
        """Prompts that each round draws, as a multiple of the groups that are missing; at least 1."""
        return 1.0

    def setup(self, run: RunInfo) -> None:  # noqa: B027 - overriding is optional
        """Check options against the run, before anything is loaded.

        Raises:
            ConfigError: They do not go together.
        """

    def select(self, group: Sequence[Sample]) -> Sequence[Sample]:
        """Return which of a prompt's scored samples train.

        None at all rejects the prompt: another one replaces it, within ``max_refills`` rounds. Every rank calls this
        with the same samples, and must get the same answer.
        """
        return group

    @abstractmethod
    def advantages(self, batch: Batch) -> Advantages:
        """Turn rewards into per-token advantages.

        Args:
            batch: The whole step, from all ranks, on the CPU. Rows with ``reward_valid`` false must neither count in
                a statistic nor get an advantage.
        """

    @abstractmethod
    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        """Return a micro-batch's share of the policy's loss.

        Args:
            micro_batch: With ``advantages`` and ``old_logprobs``. When the update is exactly on-policy the latter are
                ``logprobs.detach()``, which saves a forward pass and changes nothing.
            logprobs: float32 [B, T], with gradient.
            entropy: float32 [B, T]; with gradient only when ``needs.entropy_gradient``.
            denominators: What to divide sums by.
        """

    def value_loss(self, micro_batch: Batch, values: Tensor, denominators: Denominators) -> LossOutput:
        """Return a micro-batch's share of the critic's loss; called when ``needs.critic``.

        Args:
            micro_batch: With ``returns``, and ``values`` from before the update.
            values: float32 [B, T] of the critic as it is now, with gradient; aligned like logprobs: ``values[b, t]``
                is of the state before token ``t``.
            denominators: What to divide sums by.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a critic and has no value_loss")

    def after_step(self, metrics: Mapping[str, float]) -> None:  # noqa: B027 - overriding is optional
        """See the metrics of a step, the same on every rank: the place to adapt a coefficient."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep of the algorithm: numbers, strings, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - overriding is optional
        """Take :meth:`state_dict` back."""
