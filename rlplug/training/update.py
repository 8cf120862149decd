"""The update: epochs x mini-batches of optimizer steps on one step's batch, down to ``Algorithm.loss``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.numpy import save_file
from torch import Tensor

from rlplug.distributed.durable_files import of_user
from rlplug.interfaces.algorithm import Denominators, LossOutput
from rlplug.interfaces.checks.algorithms import check_loss, check_per_token, check_same_names
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.process_state import watched
from rlplug.models.forward import PolicyOutput, policy_forward
from rlplug.models.lm_head import EntropyMode, TokenLogprobs
from rlplug.models.packing import PackedMicroBatch
from rlplug.observability.phase_progress import PHASE_PROGRESS
from rlplug.training.actor_critic import ActorCritic, TrainableModel
from rlplug.training.batch_plan import PassKind
from rlplug.training.passes import MicroBatchRunner, gather_logprobs
from rlplug.training.step_rows import StepRows
from rlplug.types import StepBatch


class NonFiniteUpdate(Exception):
    """A loss or gradient was NaN or infinite; the weights are those from before that optimizer step."""


@dataclass(frozen=True)
class MicroBatchLoss:
    """A micro-batch's share of a loss."""

    output: LossOutput
    """Metrics hold the losses by name."""
    tokens: TokenLogprobs | None = None
    """float32 [K], of the policy; ``None`` when it did not run"""
    per_token: Mapping[str, Tensor] = field(default_factory=dict)
    """Bool or float [K], detached: ``entropy``, and what the algorithm says of single tokens."""


@dataclass(frozen=True)
class TrainingLoss:
    """A loss that optimizer steps minimise: the policy's, the critic's, or both on one trunk."""

    models: tuple[TrainableModel, ...]
    """Models that its gradient moves, and whose optimizers step."""
    call: PluginCall
    """The algorithm's call that gives it, for messages."""
    compute: Callable[[PackedMicroBatch, Denominators], MicroBatchLoss]
    """Returns the share of a micro-batch, on the device."""
    num_epochs: int | None = None
    """Passes over a step's batch; ``None`` for the batch plan's."""
    kind: PassKind = "update"
    """Kind of the passes, which gives their sizes."""


@dataclass(frozen=True)
class MiniBatchResult:
    """Measurements of the passes over a mini-batch, reduced over micro-batches and ranks."""

    metrics: dict[str, float]
    maxima: dict[str, float]
    minima: dict[str, float]
    tokens: TokenLogprobs | None
    """float32 [N] of this rank's own rows, of the policy before the update; ``None`` where one mini-batch is not the
    whole step, or the policy did not run"""


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
    """Takes the optimizer steps of an RL step, of the critic too where there is one. Every method is collective.

    Args:
        losses: Returns the losses that a step, from 1, minimises, in order.
        models: Policy and critic with their optimizers.
        runner: Brings micro-batches to the device.
        backward: Runs the backward pass of a loss.
        skip_nonfinite: Skip an optimizer step whose loss or gradient is not finite, rather than raise.
        seed: Seeds the order of mini-batches from the second epoch on.
    """

    losses: Callable[[int], Sequence[TrainingLoss]]
    models: ActorCritic
    runner: MicroBatchRunner
    backward: Callable[[Tensor], None]
    skip_nonfinite: bool
    seed: int

    def run(self, batch: StepBatch, step: int) -> UpdateResult:
        """Go through the rows of ``step`` for each of its losses, with an optimizer step for each mini-batch.

        Raises:
            NonFiniteUpdate: A loss or gradient is not finite, unless such optimizer steps are to be skipped.
        """
        plan, taken, tokens = self.runner.plan, StepMetrics(), None
        rows = self.runner.rows_of(batch)
        for loss in self.losses(step):
            for epoch in range(loss.num_epochs or plan.num_epochs):
                for row_indices in plan.mini_batches(rows.num_sequences, epoch, self.seed + step):
                    result = self.forward_backward(rows, row_indices, loss)
                    self.take_step(loss, result, taken)
                    tokens = result.tokens or tokens
        return UpdateResult(taken.summary(), tokens)

    def forward_backward(
        self, rows: StepRows, row_indices: Sequence[int], loss: TrainingLoss, denominators: Denominators | None = None
    ) -> MiniBatchResult:
        """Run one mini-batch's forward and backward passes; gradients are reduced over ranks in the last one.

        Args:
            rows: The rows of the step.
            row_indices: Rows of the mini-batch.
            loss: What is minimised.
            denominators: What divides the loss; by default the counts of the mini-batch.
        """
        runner, denominators = self.runner, denominators or rows.denominators(row_indices)
        fetched = runner.fetch(rows, row_indices, loss.kind)
        PHASE_PROGRESS.expect(len(fetched.micro_batches), "passes")
        metrics, maxima, minima, tokens = [], [], [], []
        for index, micro_batch in enumerate(fetched.micro_batches):
            for model in loss.models:
                is_last = index == len(fetched.micro_batches) - 1
                runner.strategy.set_last_micro_batch(model.module, is_last=is_last)
            share = loss.compute(runner.load(fetched, micro_batch), denominators)
            self.backward(share.output.loss)
            metrics.append(_detached(share.output.metrics))
            maxima.append(_detached(share.output.maxima))
            minima.append(_detached(share.output.minima))
            tokens.append(share.tokens and share.tokens.detach())
            if runner.token_log is not None and share.tokens is not None:
                indices = [] if micro_batch.is_filler else list(micro_batch.indices)
                num_tokens = rows.table["num_tokens"][indices].tolist()
                values = {"logprobs": share.tokens.logprobs.detach(), **share.per_token}
                runner.token_log.add([rows.keys[index] for index in indices], num_tokens, values)
            PHASE_PROGRESS.advance(1)
        shared = {} if runner.plan.layout is None else {"batch/shared_tokens": fetched.shared_share(runner.plan.layout)}
        return MiniBatchResult(
            metrics=self._reduce(loss.call, metrics, torch.sum, dist.ReduceOp.SUM) | shared,
            maxima=self._reduce(loss.call, maxima, torch.amax, dist.ReduceOp.MAX),
            minima=self._reduce(loss.call, minima, torch.amin, dist.ReduceOp.MIN),
            tokens=gather_logprobs(fetched, tokens) if runner.plan.is_on_policy else None,
        )

    def take_step(self, loss: TrainingLoss, result: MiniBatchResult, taken: StepMetrics) -> None:
        """Clip, take an optimizer step with the gradients that are there, and add its metrics to ``taken``.

        Raises:
            NonFiniteUpdate: The loss or a gradient is not finite, unless such optimizer steps are to be skipped.
        """
        for model in loss.models:
            norm = self.runner.strategy.clip_grad_norm(model.module, model.max_grad_norm)
            result.metrics[f"{model.name}/grad_norm"] = norm
        watched = {name: value for name, value in result.metrics.items() if name.endswith(("loss", "grad_norm"))}
        is_finite = all(math.isfinite(value) for value in watched.values())
        if not is_finite and not self.skip_nonfinite:
            raise NonFiniteUpdate(", ".join(f"{name} {value}" for name, value in watched.items()))
        for model in loss.models:
            if is_finite:
                with separate_memory_pool(model.optimizer):
                    model.optimizer.step()
            model.optimizer.zero_grad()
        if is_finite:
            taken.add(result)
        else:
            taken.num_skipped += 1

    def end_step(self, step: int) -> dict[str, float]:
        """Step the learning-rate schedulers of the models that ``step`` trained; return the rates that it used."""
        rates: dict[str, float] = {}
        for model in (model for loss in self.losses(step) for model in loss.models):
            rates[f"{model.name}/lr"] = model.optimizer.param_groups[0]["lr"]
            if model.scheduler is not None:
                model.scheduler.step()
        return rates

    def _reduce(
        self, call: PluginCall, parts: Sequence[dict[str, Tensor]], function: Callable[..., Tensor], operation: Any
    ) -> dict[str, float]:
        """Reduce each name over micro-batches and ranks."""
        check_same_names(call, parts)
        if not parts[0]:
            return {}
        strategy = self.runner.strategy
        values = function(torch.stack([torch.stack([*part.values()]).float() for part in parts]), dim=0)
        if strategy.data_size > 1:
            dist.all_reduce(values, operation, group=strategy.data_group)
        return dict(zip(parts[0], values.tolist(), strict=True))


def policy_losses(models: ActorCritic, step: int) -> list[TrainingLoss]:
    """Return the loss that every step of a run without a critic minimises."""
    return [TrainingLoss((models.policy,), PluginCall(models.algorithm, "loss"), partial(policy_loss, models))]


def forward_policy(models: ActorCritic, micro_batch: PackedMicroBatch) -> PolicyOutput:
    """Run the policy for its loss."""
    entropy: EntropyMode = "gradient" if models.algorithm.needs.entropy_gradient else "value"
    return policy_forward(models.policy.module, micro_batch, models.sampling, entropy)


def policy_loss(
    models: ActorCritic, micro_batch: PackedMicroBatch, denominators: Denominators, output: PolicyOutput | None = None
) -> MicroBatchLoss:
    """Return a micro-batch's share of the algorithm's loss of the policy.

    Args:
        models: The models, and the algorithm.
        micro_batch: Tokens on the device.
        denominators: Counts of the mini-batch, which divide the loss.
        output: What the policy computed for the micro-batch; by default it runs now.
    """
    output = output or forward_policy(models, micro_batch)
    batch, logprobs, entropy = micro_batch.batch, output.tokens.logprobs, output.entropy
    if batch.old_logprobs is None:  # exactly on-policy: the current logprobs are the old ones
        batch = batch.replace(old_logprobs=logprobs.detach())
    call = PluginCall(models.algorithm, "loss")
    if models.loss_hook is None:
        with watched(call):
            result = check_loss(call, models.algorithm.loss(batch, logprobs, entropy, denominators))
    else:
        result = models.loss_hook(
            algorithm=models.algorithm, micro_batch=batch, logprobs=logprobs, entropy=entropy, denominators=denominators
        )
    mean_entropy = entropy.detach().sum() / max(denominators.num_tokens, 1)
    metrics = {"loss": result.loss, "policy/entropy": mean_entropy, **result.metrics}
    if output.num_differing is not None:
        metrics["router/differ"] = output.num_differing / max(denominators.num_routed, 1)
    per_token = {"entropy": entropy.detach(), **check_per_token(call, result, logprobs)}
    return MicroBatchLoss(LossOutput(result.loss, metrics, result.maxima, result.minima), output.tokens, per_token)


def save_for_inspection(batch: StepBatch, file: Path) -> None:
    """Write a rank's rows of a step: one array per field of :class:`Batch`, and the ``lengths`` of sequences."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with of_user(file):
        save_file({"lengths": batch.lengths, **batch.per_sequence, **batch.per_token}, file)


def _detached(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in metrics.items()}


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
        for mine, new in ((self._means, result.metrics), (self._maxima, result.maxima), (self._minima, result.minima)):
            for name, value in new.items():
                mine.setdefault(name, []).append(value)

    def summary(self) -> dict[str, float]:
        """Return means, and the extremes that exist: a mini-batch without a trainable token has none."""
        means = {name: sum(values) / len(values) for name, values in self._means.items()}
        extremes = {name: max(values) for name, values in self._maxima.items()}
        extremes |= {name: min(values) for name, values in self._minima.items()}
        found = {name: value for name, value in extremes.items() if math.isfinite(value)}
        return means | found | {"policy/skipped_updates": float(self.num_skipped)}
