"""Algorithm interface: sample selection, advantages and losses as pure functions on tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor

from rlplug.types import Batch, Sample, StepBatch


@dataclass(frozen=True)
class Needs:
    """Inputs that the loop must prepare for an algorithm; anything else is not computed.

    Attributes:
        groups: Whether it compares several completions of a prompt: ``group_size`` must be at least 2.
        old_logprobs: Whether :meth:`Algorithm.advantages` reads ``batch.tokens.old_logprobs``, on-policy steps
            included.
        reference_policy: Whether it reads ``ref_logprobs``, which need a frozen copy of the initial policy.
        rollout_logprobs: Whether it reads ``rollout_logprobs``, which the engine must return.
        critic: Whether it reads ``values``, of a critic that :meth:`Algorithm.value_loss` trains.
        entropy_gradient: Whether its loss needs the entropy's gradient; otherwise entropy is a metric only.
    """

    groups: bool = False
    old_logprobs: bool = False
    reference_policy: bool = False
    rollout_logprobs: bool = False
    critic: bool = False
    entropy_gradient: bool = False


@dataclass(frozen=True)
class RunInfo:
    """Properties of a run that an algorithm gets before the run starts.

    Attributes:
        num_completions: Completions of one step, over all ranks.
        group_size: Completions per prompt.
        max_new_tokens: Longest completion, in tokens.
        fp8_rollout: Whether the engine computes with FP8 weights while the trainer does not.
        seed: Seed of the run, for what an algorithm draws at random.
    """

    num_completions: int
    group_size: int
    max_new_tokens: int
    fp8_rollout: bool = False
    seed: int = 0


LossDivisor: TypeAlias = Literal["num_tokens", "num_sequences"]
"""Field of :class:`Denominators` that divides a loss."""


@dataclass(frozen=True)
class Denominators:
    """Global counts of one mini-batch, over all ranks and micro-batches.

    A loss divides its sums by these, never by a count of its own micro-batch. The losses of all micro-batches on all
    ranks then add up to the same loss and gradients for every split.

    Attributes:
        num_tokens: Number of trainable tokens (``response_mask``).
        num_sequences: Number of sequences with at least one trainable token.
        num_routed: Number of (token, layer) pairs whose experts are replayed; 0 without router replay.
    """

    num_tokens: int
    num_sequences: int
    num_routed: int = 0


@dataclass(frozen=True)
class Advantages:
    """Result of :meth:`Algorithm.advantages`: one number for each completion, or for each trainable token.

    B and K are as in ``batch.tokens``. One of the first two fields is given.

    Attributes:
        of_sequences: float32 [B]: one number for all trainable tokens of a completion
        of_tokens: float32 [K]
        returns: float32 [K]: targets of the critic
        trains: bool [K]: false for tokens that are not to train in this step; ``None`` trains all
        metrics: Numbers over the whole step, the same on every rank: ``batch.step`` computes them.
    """

    of_sequences: Tensor | None = None
    of_tokens: Tensor | None = None
    returns: Tensor | None = None
    trains: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LossOutput:
    """Result of :meth:`Algorithm.loss` for one micro-batch. All tensors but ``per_token`` are float32 scalars.

    Attributes:
        loss: Loss of this micro-batch, as a term of the mini-batch's loss.
        metrics: Terms of the mini-batch's metrics: the loop adds them up over micro-batches and ranks, as it does the
            loss.
        maxima: Metrics of which the loop keeps the largest value over micro-batches, ranks and optimizer steps.
        minima: Metrics of which the loop keeps the smallest value over micro-batches, ranks and optimizer steps.
        per_token: Numbers of each token for the token log, bool or float [K], which no gradient follows: ``ratio``,
            ``clipped_low`` and ``clipped_high``, for which of them the algorithm clipped, and any other.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    minima: dict[str, Tensor] = field(default_factory=dict)
    per_token: Mapping[str, Tensor] = field(default_factory=dict)


class Algorithm(ABC):
    """Base class of algorithms: advantages, a loss, and optionally a selection of samples. It knows no trainer."""

    @property
    def needs(self) -> Needs:
        """Inputs that the loop must prepare; none by default."""
        return Needs()

    @property
    def streamed_divisor(self) -> LossDivisor | None:
        """Count that divides the loss, where a step can train on groups as they complete; ``None``, the default, else.

        With ``model.partial_rollout.max_staleness: 0`` passes run over some groups while the others are generated, so
        that nobody knows the step's denominators yet. Gradients are sums then, and the loop divides them by this count
        when the last group is in. An algorithm that returns one says that

        - :meth:`advantages` of a group depend on no other group, but for its metrics;
        - :meth:`loss` is proportional to ``1 / max(denominators.<this count>, 1)``, and depends on no other count;
        - the metrics of :meth:`loss` are means over tokens, divided by ``denominators.num_tokens``.

        The loop checks the first in each step, and the others in the first step of a run. There is one optimizer step
        a rollout, and no critic.
        """
        return None

    @property
    def max_refills(self) -> int:
        """Largest number of extra rounds of prompts in a step, which replace groups that :meth:`select` left empty."""
        return 0

    @property
    def over_sampling(self) -> float:
        """Number of prompts that each round draws, as a multiple of the number of missing groups; at least 1."""
        return 1.0

    def setup(self, run: RunInfo) -> None:  # noqa: B027 - overriding is optional
        """Check the algorithm's options against the run, before any model is loaded; another run has another object.

        Raises:
            ConfigError: The options are not valid for this run.
        """

    def select(self, group: Sequence[Sample]) -> Sequence[Sample]:
        """Return which of a prompt's scored samples train.

        An empty result rejects the prompt: another one replaces it, within ``max_refills`` rounds. The rank that has
        the group calls this, in no order that an algorithm may rely on: a random draw is seeded by the run's seed, the
        step and ``group[0].group``.
        """
        return group

    @abstractmethod
    def advantages(self, batch: StepBatch) -> Advantages:
        """Turn rewards into advantages.

        Every rank calls this with completions of its own, whole groups, on the CPU. A rank may have none. A number
        over the whole step, such as a mean by which advantages are normalised, comes from ``batch.step``, whose methods
        all ranks must call in the same order: never under a condition that ranks may answer differently.

        Args:
            batch: This rank's completions. Those with ``reward_valid`` false must neither count in a statistic nor get
                an advantage. ``batch.tokens`` has their trainable tokens, which an algorithm that gives one number a
                completion does not need.
        """

    @abstractmethod
    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        """Return the policy loss of a micro-batch, as a term of the mini-batch's loss.

        Args:
            micro_batch: K trainable tokens with ``advantages`` and ``old_logprobs``. When the update is exactly
                on-policy, the latter are ``logprobs.detach()``, which saves a forward pass and changes nothing. K is 0
                where a rank has no rows left, and the loss 0.
            logprobs: float32 [K], with gradient.
            entropy: float32 [K]; with gradient only when ``needs.entropy_gradient``.
            denominators: Counts of the mini-batch, by which sums are divided.
        """

    def value_loss(self, micro_batch: Batch, values: Tensor, denominators: Denominators) -> LossOutput:
        """Return the critic loss of a micro-batch, as a term of the mini-batch's; called when ``needs.critic``.

        Args:
            micro_batch: K trainable tokens with ``returns``, and ``values`` from before the update.
            values: float32 [K] of the current critic, with gradient, each of the state before its token.
            denominators: Counts of the mini-batch, by which sums are divided.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a critic and has no value_loss")

    def after_step(self, metrics: Mapping[str, float]) -> None:  # noqa: B027 - overriding is optional
        """Observe the metrics of a step, the same on every rank, for example to adapt a coefficient."""

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's state for a checkpoint: numbers, strings, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - overriding is optional
        """Restore the state that :meth:`state_dict` returned."""
