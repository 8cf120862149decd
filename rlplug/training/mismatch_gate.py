"""Engine-trainer mismatch: measures it on the sampled tokens, stops a run above a limit, and says when it jumps."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from rlplug.errors import RunError
from rlplug.interfaces.rollout import PolicySpec
from rlplug.ops import difference_metrics
from rlplug.types import SamplingParams, StepBatch

ROUNDED: Final = 0.1
"""Limit of the mean in nats where engine or trainer round to bfloat16 or FP8. The largest mean of a sound bfloat16 step
in ``benchmarks/results`` is 0.048, that of a step with an FP8 engine 0.018."""
FLOAT32: Final = 1e-4
"""Limit in float32 on CPUs, where steps show 1e-7 to 1e-6."""
FLOAT32_ON_GPU: Final = 1e-2
"""Limit in float32 on GPUs, whose attention kernels may multiply in TF32, with 10 bits of mantissa. Not measured."""
HISTORY: Final = 20
"""Steps whose median is what a run usually has."""
LEAST_HISTORY: Final = 5
JUMP: Final = 4.0
"""How many times the usual mean is a jump, if it is also above a tenth of the limit for the dtype."""
LEAST_TOKENS: Final = 100
"""Fewest tokens of the newest version whose mean is a gate, in a step that may have few of them."""
LARGEST_LOG_WEIGHT: Final = 20.0
"""Logarithms of importance weights are cut to this size, in nats: an algorithm cuts weights long before."""


def limit_of(policy: PolicySpec, device: torch.device, sampling: SamplingParams) -> float:
    """Return the limit for an engine and a trainer that compute a policy in its dtype, in nats.

    Temperatures below 1 scale differences of logits. Top-k and top-p leave tokens at the border in or out, each of
    which changes the logprobs of its position, so float32 has no narrow limit there.
    """
    if policy.dtype != torch.float32 or policy.fp8 is not None:
        return ROUNDED
    cuts = not sampling.is_greedy and sampling.is_truncated
    limit = FLOAT32 if device.type == "cpu" and not cuts else FLOAT32_ON_GPU
    return limit if sampling.is_greedy else min(ROUNDED, limit / min(1.0, sampling.temperature))


class MismatchGate:
    """Compares the logprobs of engine and trainer, for the same tokens and the same weights.

    Args:
        engine: Name of the engine, for messages.
        limit: Largest mean absolute difference of logprobs, in nats; ``None`` stops no run.
        usual_limit: Limit for the dtype, :func:`limit_of`: a tenth of it is the least that counts as a jump.
        every_step: Apply the limit in every step, and not only in the first one of a run.
        has_old_tokens: Whether a batch may have tokens of older versions, as in a partial rollout.
        max_age: Largest age of tokens, in versions, by which importance weights are measured; ``None`` for no measure.
        extra: Names in ``sampling.extra``, which change what the engine samples from, and not the trainer's logprobs.
    """

    def __init__(
        self,
        engine: str,
        limit: float | None,
        usual_limit: float,
        every_step: bool,
        has_old_tokens: bool,
        max_age: int | None = None,
        extra: Iterable[str] = (),
    ) -> None:
        self.limit, self._usual_limit = limit, usual_limit
        self._engine, self._every_step = engine, every_step
        self._has_old_tokens, self._max_age = has_old_tokens, max_age
        self._extra = ", ".join(extra)
        self._history: deque[float] = deque(maxlen=HISTORY)
        self._is_high = False

    def compare(
        self, batch: StepBatch, sampled_logprobs: Tensor, policy_version: int, step: int, is_first_step: bool
    ) -> dict[str, float]:
        """Return ``mismatch/...`` metrics over the tokens of ``policy_version``, and those by age. Collective.

        Args:
            batch: This rank's rows of the step, with ``rollout_logprobs`` and ``policy_versions``.
            sampled_logprobs: float32 [N], the trainer's.
            policy_version: Version of the trainer's weights. Tokens of older versions, which a partial rollout has, may
                differ.
            step: Number of the step, for the message.
            is_first_step: Whether it is the first step of this process.

        Raises:
            RunError: The mismatch is above the limit.
        """
        by_age: dict[str, float] = {}
        if self._max_age is not None:
            by_age = weights_by_age(batch, sampled_logprobs, policy_version, self._max_age)
        tokens = batch.per_token
        mask = tokens["response_mask"] & (tokens["policy_versions"] == policy_version)
        difference = np.where(mask, sampled_logprobs.numpy() - tokens["rollout_logprobs"], np.float32(0))
        has_tokens = batch.sums(mask) > 0
        num_compared = float(batch.step.sum(torch.tensor(mask.sum()))) if self._has_old_tokens else None
        if num_compared == 0:
            return by_age
        metrics = difference_metrics(
            torch.from_numpy(difference[mask]), torch.from_numpy(batch.sums(difference)[has_tokens]), batch.step
        )
        if num_compared is None or num_compared >= LEAST_TOKENS:
            self._judge(metrics["mismatch/mean"], metrics["mismatch/max"], step, is_first_step)
        return metrics | by_age

    def _judge(self, mean: float, largest: float, step: int, is_first_step: bool) -> None:
        disagree = (
            f"step {step}: {self._engine} and the trainer disagree on the same tokens and weights: mean |difference of "
            f"logprobs| {mean:.3g}, maximum {largest:.3g}"
        )
        if self.limit is not None and (is_first_step or self._every_step) and not mean <= self.limit:
            of_extra = (
                f"model.sampling.extra ({self._extra}) changes what the engine samples from, and not the trainer's "
                "logprobs: weaken or remove it. "
            )
            raise RunError(
                f"{disagree}, gate {self.limit:g}. {of_extra if self._extra else ''}Look for weights that a sync left "
                "out, other weights, dtype, temperature or chat template in the engine; model.limits.mismatch_gate "
                "sets the limit."
            )
        usual = statistics.median(self._history) if len(self._history) >= LEAST_HISTORY else mean
        is_jump = mean > max(JUMP * usual, self._usual_limit / 10)
        if is_jump and not self._is_high:
            rank_zero_warn(
                f"{disagree}; the median of the last {len(self._history)} steps is {usual:.3g}. Weights may not have "
                "reached the engine. A model.limits.mismatch_gate between the two stops the run there."
            )
        self._is_high = is_jump
        if not is_jump:
            self._history.append(mean)


def weights_by_age(batch: StepBatch, sampled_logprobs: Tensor, policy_version: int, max_age: int) -> dict[str, float]:
    """Return mean and maximum of pi(token) / pi_engine(token) for each age that tokens have. Collective.

    A mean far from 1 says that tokens of that age were sampled by another policy than the one that trains.

    Args:
        batch: This rank's rows of the step, with ``rollout_logprobs`` and ``policy_versions``.
        sampled_logprobs: float32 [N], the trainer's, before the update.
        policy_version: Version of the trainer's weights.
        max_age: Largest age, in versions, of which there is a metric.

    Returns:
        ``partial/weight_mean_<age>``, ``partial/weight_max_<age>`` and ``partial/token_share_<age>``, the share of the
        tokens, for the ages that occur.
    """
    tokens = batch.per_token
    mask = tokens["response_mask"]
    ages = policy_version - tokens["policy_versions"][mask]
    difference = sampled_logprobs.numpy()[mask] - tokens["rollout_logprobs"][mask]
    weights = np.exp(np.clip(difference.astype(np.float64), -LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT))
    of_ages = [weights[ages == age] for age in range(max_age + 1)]
    mine = torch.tensor([[len(found), found.sum(), found.max(initial=0.0)] for found in of_ages], dtype=torch.float64)
    counts, sums, largest = batch.step.gather(mine).unbind(dim=2)
    metrics = {}
    for age, count in enumerate(counts.sum(dim=0).tolist()):
        if count:
            metrics[f"partial/weight_mean_{age}"] = float(sums[:, age].sum()) / count
            metrics[f"partial/weight_max_{age}"] = float(largest[:, age].max())
            metrics[f"partial/token_share_{age}"] = count / float(counts.sum())
    return metrics
