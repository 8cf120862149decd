"""The update: epochs x mini-batches of optimizer steps on one step's batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlplug.training.forward_backward import MicroBatchRunner, MiniBatchResult
from rlplug.training.losses import Objective
from rlplug.types import Batch


class NonFiniteUpdate(Exception):
    """A loss or gradient was NaN or infinite; the weights are those from before that optimizer step."""


@dataclass(frozen=True)
class UpdateResult:
    """What :meth:`Update.run` returns."""

    metrics: dict[str, float]
    """Means over the step's optimizer steps, and extremes over all of them."""
    sampled_logprobs: Tensor | None
    """float32 [B, T] on the CPU, of the policy before the update, when one optimizer step was all."""


@dataclass(frozen=True)
class Update:
    """Takes the optimizer steps of an RL step.

    Args:
        passes: How rows are computed.
        backward: Runs the backward pass of a loss.
        skip_nonfinite: Skip an optimizer step whose loss or gradient is not finite, rather than raise.
        seed: Of the order of mini-batches from the second epoch on.
    """

    passes: MicroBatchRunner
    backward: Callable[[Tensor], None]
    skip_nonfinite: bool
    seed: int

    def run(self, batch: Batch, objectives: Sequence[Objective], step: int) -> UpdateResult:
        """Go through the batch of ``step`` for each objective in turn, with an optimizer step for each mini-batch.

        Raises:
            NonFiniteUpdate: A loss or gradient is not finite, unless such optimizer steps are to be skipped.
        """
        plan, taken, sampled_logprobs = self.passes.plan, StepMetrics(), None
        for objective in objectives:
            for epoch in range(objective.num_epochs or plan.num_epochs):
                for rows in plan.mini_batches(batch.num_sequences, epoch, self.seed + step):
                    result = self.passes.accumulate(batch, rows, objective, self.backward)
                    if self._step(objective, result.metrics):
                        taken.add(result)
                    else:
                        taken.num_skipped += 1
                    if plan.is_on_policy and result.sampled_logprobs is not None:
                        sampled_logprobs = result.sampled_logprobs
        return UpdateResult(taken.summary(), sampled_logprobs)

    def _step(self, objective: Objective, metrics: dict[str, float]) -> bool:
        """Clip, note gradient norms in ``metrics``, step; return False for a step that had to be skipped."""
        for trainee in objective.trainees:
            norm = self.passes.strategy.clip_grad_norm(trainee.module, trainee.max_grad_norm)
            metrics[f"{trainee.name}/grad_norm"] = norm
        watched = {name: value for name, value in metrics.items() if name.endswith(("loss", "grad_norm"))}
        is_finite = all(math.isfinite(value) for value in watched.values())
        if not is_finite and not self.skip_nonfinite:
            raise NonFiniteUpdate(", ".join(f"{name} {value}" for name, value in watched.items()))
        for trainee in objective.trainees:
            if is_finite:
                with separate_memory_pool(trainee.optimizer):
                    trainee.optimizer.step()
            trainee.optimizer.zero_grad()
        return is_finite


@contextmanager
def separate_memory_pool(optimizer: Any) -> Iterator[None]:
    """Let an optimizer's first step, which makes its state, take memory of its own on a GPU.

    Else the state, which stays, would lie in what activations have left between other tensors, and for one megabyte of
    it torch could not give a block of hundreds back to the device, where the engine wants it.
    """
    if optimizer.state or not torch.cuda.is_available():
        yield
        return
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        yield


class StepMetrics:
    """Collects what the optimizer steps of an RL step measured."""

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
