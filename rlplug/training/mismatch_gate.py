"""Engine-trainer mismatch: measures it on the sampled tokens, and stops a run above a limit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlplug.errors import RunError
from rlplug.ops import difference_metrics
from rlplug.types import StepBatch


@dataclass(frozen=True)
class MismatchGate:
    """Compares the logprobs of engine and trainer, for the same tokens and the same weights.

    Args:
        engine: Name of the engine, for messages.
        limit: Largest mean absolute difference of logprobs, in nats; ``None`` only measures.
        every_step: Apply the limit in every step, and not only in the first one of a run.
        has_old_tokens: Whether a batch may have tokens of older versions alone, as in a partial rollout.
    """

    engine: str
    limit: float | None
    every_step: bool
    has_old_tokens: bool

    def compare(
        self, batch: StepBatch, sampled_logprobs: Tensor, policy_version: int, step: int, is_first_step: bool
    ) -> dict[str, float]:
        """Return ``mismatch/...`` metrics over the tokens of ``policy_version``, of all ranks. Collective.

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
        tokens = batch.per_token
        mask = tokens["response_mask"] & (tokens["policy_versions"] == policy_version)
        difference = np.where(mask, sampled_logprobs.numpy() - tokens["rollout_logprobs"], np.float32(0))
        has_tokens = batch.sums(mask) > 0
        if self.has_old_tokens and not batch.step.sum(torch.tensor(mask.sum())):
            return {}
        metrics = difference_metrics(
            torch.from_numpy(difference[mask]), torch.from_numpy(batch.sums(difference)[has_tokens]), batch.step
        )
        if self.limit is None or not (is_first_step or self.every_step):
            return metrics
        mean, largest = metrics["mismatch/mean"], metrics["mismatch/max"]
        if not mean <= self.limit:
            raise RunError(
                f"step {step}: {self.engine} and the trainer disagree on the same tokens and weights: mean |difference "
                f"of logprobs| {mean:.4f}, maximum {largest:.3f}, gate {self.limit}. Look for other weights, dtype, "
                "temperature or chat template in the engine; model.limits.mismatch_gate sets the limit."
            )
        return metrics
