"""Passes over a step's complete groups while its others are generated: ``model.partial_rollout.max_staleness: 0``.

A step comes in parts. Each part runs its forward and backward passes with denominators of 1, so that gradients and
metrics are sums. When the last group is in, they are divided by the denominators of the whole step, and the optimizer
steps. The result is that of one mini-batch of the whole step, but for round-off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from rlplug.distributed.offload import Offload
from rlplug.errors import RunError
from rlplug.interfaces.algorithm import Denominators, LossDivisor
from rlplug.models.lm_head import TokenLogprobs
from rlplug.training.advantages import compute_advantages
from rlplug.training.passes import compute_logprobs
from rlplug.training.step_training import StepTraining
from rlplug.training.update import MiniBatchResult, PolicyUpdate, StepMetrics, UpdateResult
from rlplug.types import Rollout, Sample, StepBatch
from rlplug_async.undivided_loss import SUMS, divisor_of, undivided_loss

CHOSEN: Final = ("group_index", "advantages", "response_mask")
"""Arrays that tell which tokens trained, and how much."""
SAMPLED: Final = "sampled_logprobs"
"""Name of the trainer's logprobs among the arrays of a part."""


@dataclass(frozen=True)
class StepPart:
    """Groups of a step whose passes have run."""

    batch: StepBatch
    """This rank's rows before there were advantages, with ``SAMPLED``."""
    choice: StepBatch
    """The same rows with ``CHOSEN`` alone, as they trained."""
    result: MiniBatchResult
    """Sums over the rows of all ranks."""
    denominators: Denominators
    """Counts over the rows of all ranks."""


class StreamedStep(StepTraining):
    """The parts of the step that runs. Every method but :meth:`discard` is collective.

    Args:
        update: The update, of one optimizer step a rollout and without a critic.
        offload: Copies the reference policy to the device.
        make_batch: Returns samples as a batch.
        phase: Makes a context that times a phase of the step, by its name.
    """

    def __init__(
        self,
        update: PolicyUpdate,
        offload: Offload,
        make_batch: Callable[[Sequence[Sample]], StepBatch],
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        super().__init__(update, offload, make_batch, phase)
        algorithm = update.models.algorithm
        assert algorithm.streamed_divisor is not None, "the configuration is checked before"
        self._algorithm = algorithm
        self._divisor: LossDivisor = algorithm.streamed_divisor
        self._parts: list[StepPart] = []
        self._num_samples = self._num_groups = 0
        self._overlap_s = 0.0

    def add(self, rollout: Rollout, step: int, is_first_step: bool, awaits_groups: bool) -> None:
        """Run the passes over the groups that ``rollout`` has gained, in the phase ``update``.

        Raises:
            RunError: The loss is not divided as the algorithm says, which a process checks in its first step.
        """
        samples, self._num_samples = rollout.samples[self._num_samples :], len(rollout.samples)
        num_groups, self._num_groups = rollout.num_groups - self._num_groups, rollout.num_groups
        if not num_groups:
            return
        began = time.monotonic()
        with self._phase("update"):
            batch = self._make_batch(sorted(samples, key=lambda sample: sample.group))
            self._parts.append(self._passes(batch, step, is_first_step))
        if awaits_groups:
            self._overlap_s += time.monotonic() - began

    def logprobs(self, rollout: Rollout, step: int, is_first_step: bool) -> tuple[StepBatch, None]:
        """Return this rank's rows of the whole step; :meth:`run` has the trainer's logprobs of them."""
        return StepBatch.join([part.batch for part in self._parts]).with_tokens(**{SAMPLED: None}), None

    def require_advantages(self, batch: StepBatch) -> None:
        """Check that the step's groups had the advantages that they have among all groups of the step.

        Args:
            batch: This rank's rows of the whole step, with advantages.

        Raises:
            RunError: They differ; on all ranks.
        """
        found, expected = StepBatch.join([part.choice for part in self._parts]), _choice(batch)
        is_equal = all(
            mine.keys() == whole.keys() and all(_is_equal(mine[name], whole[name]) for name in mine)
            for mine, whole in ((found.per_sequence, expected.per_sequence), (found.per_token, expected.per_token))
        )
        if self._update.runner.strategy.any_rank(not is_equal):
            name = type(self._algorithm).__name__
            raise RunError(
                f"{name}.streamed_divisor says that its advantages need no other group, and those of the whole step "
                "differ from those of its parts. Set model.partial_rollout.max_staleness to 1 or more, or remove "
                f"model.partial_rollout; the author of {name} would let streamed_divisor return None."
            )

    @property
    def run(self) -> Callable[[StepBatch, int], UpdateResult]:
        return self._finish

    def _finish(self, batch: StepBatch, step: int) -> UpdateResult:
        """Divide the gradients by the denominators of the whole step, and take the optimizer step.

        Raises:
            NonFiniteUpdate: The loss or a gradient is not finite, unless such optimizer steps are to be skipped.
        """
        total = _total([part.denominators for part in self._parts])
        (loss,), taken = self._update.losses(step), StepMetrics()
        for model in loss.models:
            gradients: list[Any] = [weight.grad for weight in model.module.parameters() if weight.grad is not None]
            parts = [gradient.to_local() for gradient in gradients]
            torch._foreach_mul_(parts, 1 / max(getattr(total, self._divisor), 1))
        result = _join_results([part.result for part in self._parts], total, self._divisor)
        sampled = torch.from_numpy(StepBatch.join([part.batch for part in self._parts]).per_token[SAMPLED])
        num_parts, overlap_s = len(self._parts), self._overlap_s
        self._reset()
        self._update.take_step(loss, result, taken)
        stream = {"partial/on_arrival_batches": float(num_parts), "partial/overlap_s": overlap_s}
        return UpdateResult(taken.summary() | stream, TokenLogprobs(sampled, sampled))

    def discard(self) -> None:
        """Drop the gradients of a step that ends before its update."""
        self._update.models.policy.optimizer.zero_grad()
        self._reset()

    def _reset(self) -> None:
        self._parts, self._overlap_s = [], 0.0
        self._num_samples = self._num_groups = 0

    def _passes(self, batch: StepBatch, step: int, checks: bool) -> StepPart:
        """Run all passes over a part; its last backward pass reduces its gradients over ranks.

        So a step needs not know which part is its last, and no gradients of whole parameters are kept between parts.
        """
        models, runner = self._update.models, self._update.runner
        batch, tokens = compute_logprobs(batch, models, runner, self._offload, step, always=False)
        trained, _ = compute_advantages(self._algorithm, batch, runner.strategy.gather)
        rows = runner.rows_of(trained)
        everything = range(rows.num_sequences)
        wrong: list[str] = []
        (loss,) = self._update.losses(step)
        if checks:
            loss = replace(loss, compute=partial(undivided_loss, models, self._divisor, wrong))
        result = self._update.forward_backward(rows, everything, loss, SUMS)
        if checks and (wrong := runner.strategy.gather(wrong)):
            raise RunError(
                f"{type(self._algorithm).__name__}.streamed_divisor is {self._divisor!r}, and {wrong[0]}, by the "
                "algorithm or a plugin that wraps its loss. Set model.partial_rollout.max_staleness to 1 or more, or "
                "remove model.partial_rollout."
            )
        tokens = result.tokens or tokens
        assert tokens is not None, "one optimizer step a rollout returns the policy's logprobs"
        batch = batch.with_tokens(**{SAMPLED: tokens.sampled_logprobs})
        return StepPart(batch, _choice(trained), result, rows.denominators(everything))


def _choice(batch: StepBatch) -> StepBatch:
    """Return the rows with ``CHOSEN`` alone."""
    return replace(
        batch,
        per_sequence={name: array for name, array in batch.per_sequence.items() if name in CHOSEN},
        per_token={name: array for name, array in batch.per_token.items() if name in CHOSEN},
    )


def _is_equal(found: NDArray[Any], expected: NDArray[Any]) -> bool:
    """Return whether arrays are equal; floats, but for round-off."""
    if found.dtype.kind != "f" or found.shape != expected.shape:
        return np.array_equal(found, expected)
    return np.allclose(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def _total(parts: Sequence[Denominators]) -> Denominators:
    return Denominators(
        num_tokens=sum(part.num_tokens for part in parts),
        num_sequences=sum(part.num_sequences for part in parts),
        num_routed=sum(part.num_routed for part in parts),
    )


def _join_results(parts: Sequence[MiniBatchResult], total: Denominators, divisor: LossDivisor) -> MiniBatchResult:
    """Return the metrics of the whole step from the sums of its parts."""
    return MiniBatchResult(
        metrics={
            name: sum(part.metrics[name] for part in parts) / max(getattr(total, divisor_of(name, divisor)), 1)
            for name in parts[0].metrics
        },
        maxima={name: max(part.maxima[name] for part in parts) for name in parts[0].maxima},
        minima={name: min(part.minima[name] for part in parts) for name in parts[0].minima},
        tokens=None,
    )
