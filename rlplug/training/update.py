"""The update: epochs x mini-batches of optimizer steps on one step's batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlplug.models.lm_head import TokenLogprobs
from rlplug.training.actor_critic import ActorCritic
from rlplug.training.forward_backward import MicroBatchRunner, MiniBatchResult
from rlplug.training.losses import TrainingLoss, step_losses
from rlplug.training.step_rows import StepRows
from rlplug.types import StepBatch


class NonFiniteUpdate(Exception):
    """A loss or gradient was NaN or infinite; the weights are those from before that optimizer step."""


@dataclass(frozen=True)
class UpdateResult:
    """Result of :meth:`PolicyUpdate.run`."""

    metrics: dict[str, float]
    """Means over the step's optimizer steps, and extremes over all of them."""
    tokens: TokenLogprobs | None
    """float32 [N] of this rank's rows, of the policy before the update; ``None`` when that took several optimizer
    steps"""


@dataclass(frozen=True)
class PolicyUpdate:
    """Takes the optimizer steps of an RL step, of the critic too where there is one.

    Args:
        models: Policy and critic with their optimizers.
        runner: Runs them over micro-batches.
        backward: Runs the backward pass of a loss.
        skip_nonfinite: Skip an optimizer step whose loss or gradient is not finite, rather than raise.
        seed: Seeds the order of mini-batches from the second epoch on.
    """

    models: ActorCritic
    runner: MicroBatchRunner
    backward: Callable[[Tensor], None]
    skip_nonfinite: bool
    seed: int

    def run(self, batch: StepBatch, step: int) -> UpdateResult:
        """Go through the rows of ``step`` for each of its losses, with an optimizer step for each mini-batch.

        Args:
            batch: This rank's rows, with advantages.
            step: Number of the step, from 1.

        Raises:
            NonFiniteUpdate: A loss or gradient is not finite, unless such optimizer steps are to be skipped.
        """
        plan, taken, tokens = self.runner.plan, StepMetrics(), None
        rows = StepRows(batch, self.runner.strategy)
        for loss in step_losses(self.models, step):
            for epoch in range(loss.num_epochs or plan.num_epochs):
                for row_indices in plan.mini_batches(rows.num_sequences, epoch, self.seed + step):
                    result = self.runner.forward_backward(rows, row_indices, loss, self.backward)
                    self.take_step(loss, result, taken)
                    tokens = result.tokens or tokens
        return UpdateResult(taken.summary(), tokens)

    def take_step(self, loss: TrainingLoss, result: MiniBatchResult, taken: StepMetrics) -> None:
        """Take an optimizer step with the gradients that are there, and add its metrics to ``taken``.

        Raises:
            NonFiniteUpdate: The loss or a gradient is not finite, unless such optimizer steps are to be skipped.
        """
        if self._optimizer_step(loss, result.metrics):
            taken.add(result)
        else:
            taken.num_skipped += 1

    def end_step(self, step: int) -> dict[str, float]:
        """Step the learning-rate schedulers of the models that ``step`` trained; return the rates that it used."""
        rates: dict[str, float] = {}
        for model in (model for loss in step_losses(self.models, step) for model in loss.models):
            rates[f"{model.name}/lr"] = model.optimizer.param_groups[0]["lr"]
            if model.scheduler is not None:
                model.scheduler.step()
        return rates

    def _optimizer_step(self, loss: TrainingLoss, metrics: dict[str, float]) -> bool:
        """Clip, write gradient norms into ``metrics``, step; return False for a step that had to be skipped."""
        for model in loss.models:
            norm = self.runner.strategy.clip_grad_norm(model.module, model.max_grad_norm)
            metrics[f"{model.name}/grad_norm"] = norm
        watched = {name: value for name, value in metrics.items() if name.endswith(("loss", "grad_norm"))}
        is_finite = all(math.isfinite(value) for value in watched.values())
        if not is_finite and not self.skip_nonfinite:
            raise NonFiniteUpdate(", ".join(f"{name} {value}" for name, value in watched.items()))
        for model in loss.models:
            if is_finite:
                with separate_memory_pool(model.optimizer):
                    model.optimizer.step()
            model.optimizer.zero_grad()
        return is_finite


def save_for_inspection(batch: StepBatch, file: Path) -> None:
    """Write a rank's rows of a step, one tensor per field of :class:`Batch`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(batch.padded.tensors(), file)


@contextmanager
def separate_memory_pool(optimizer: Any) -> Iterator[None]:
    """Allocate optimizer state, which the first step creates, in its own CUDA memory pool.

    Otherwise this long-lived state fragments blocks freed by activations, and they cannot be returned to the device
    for the engine. These blocks are returned beforehand: while a pool is in use, torch raises OutOfMemoryError rather
    than free what other pools hold (https://github.com/pytorch/pytorch/issues/159674).
    """
    if optimizer.state or not torch.cuda.is_available():
        yield
        return
    torch.cuda.empty_cache()
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        yield


class StepMetrics:
    """Metrics of an RL step, collected from its optimizer steps."""

    def __init__(self) -> None:
        self.num_skipped = 0
        self._means: dict[str, list[float]] = {}
        self._maxima: dict[str, list[float]] = {}
        self._minima: dict[str, list[float]] = {}

    def add(self, result: MiniBatchResult) -> None:
        for mine, new in (
            (self._means, result.metrics),
            (self._maxima, result.maxima),
            (self._minima, result.minima),
        ):
            for name, value in new.items():
                mine.setdefault(name, []).append(value)

    def summary(self) -> dict[str, float]:
        """Return means, and the extremes that exist: a mini-batch without a trainable token has none."""
        means = {name: sum(values) / len(values) for name, values in self._means.items()}
        extremes = {name: max(values) for name, values in self._maxima.items()}
        extremes |= {name: min(values) for name, values in self._minima.items()}
        found = {name: value for name, value in extremes.items() if math.isfinite(value)}
        return means | found | {"policy/skipped_updates": float(self.num_skipped)}
