"""The algorithm seam: what a paper adds to the loop, as pure functions on tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rlplug.types import Batch, Sample


@dataclass(frozen=True)
class Needs:
    """What the loop must prepare for an algorithm; anything not asked for is not computed."""

    reference_policy: bool = False
    """A frozen copy of the initial policy, and ``batch.ref_logprobs``."""
    critic: bool = False
    """``batch.values`` and the critic's predictions in the loss."""
    entropy_gradient: bool = False
    """Entropy with its gradient; without this it is a metric only."""


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
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LossOutput:
    """The result of :meth:`Algorithm.loss` for one micro-batch."""

    loss: Tensor
    """float32 scalar: this micro-batch's *share* of the mini-batch's loss"""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """float32 scalars, shares like the loss: the loop adds them over micro-batches and ranks"""


class Algorithm(ABC):
    """Advantages, a loss, and optionally a choice among groups. No trainer inside."""

    @property
    def needs(self) -> Needs:
        """What the loop must prepare. The default asks for nothing."""
        return Needs()

    @property
    def max_refills(self) -> int:
        """How many more rounds of prompts a step may draw to replace groups that :meth:`select` rejected."""
        return 0

    @abstractmethod
    def advantages(self, batch: Batch) -> Advantages:
        """Turn rewards into per-token advantages.

        Args:
            batch: The whole step, from all ranks, on the CPU. Rows with ``reward_valid`` false must neither count in
                a statistic nor get an advantage.
        """

    @abstractmethod
    def loss(
        self,
        micro_batch: Batch,
        logprobs: Tensor,
        entropy: Tensor,
        values: Tensor | None,
        denominators: Denominators,
    ) -> LossOutput:
        """Return a micro-batch's share of the loss.

        Args:
            micro_batch: With ``advantages`` and ``old_logprobs``. When the update is exactly on-policy the latter are
                ``logprobs.detach()``, which saves a forward pass and changes nothing.
            logprobs: float32 [B, T], with gradient.
            entropy: float32 [B, T]; with gradient only when ``needs.entropy_gradient``.
            values: float32 [B, T] from the critic, with gradient; ``None`` without a critic.
            denominators: What to divide sums by.
        """

    def select(self, groups: Sequence[Sequence[Sample]]) -> list[bool]:
        """Return which groups train. Rejected ones are replaced by new prompts, within ``max_refills`` rounds.

        Args:
            groups: The scored samples of each prompt.
        """
        return [True] * len(groups)
