"""Forward and backward passes over the rows of a step, on the ranks that the batch plan chose for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.interfaces.algorithm import Denominators
from rlplug.interfaces.checks.algorithms import check_same_names
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.models.lm_head import TokenLogprobs
from rlplug.models.packing import PackedMicroBatch, pack_batch
from rlplug.observability.phase_progress import PHASE_PROGRESS
from rlplug.training.actor_critic import ForwardOutput
from rlplug.training.batch_plan import BatchPlan, MicroBatch, PassKind
from rlplug.training.losses import TrainingLoss
from rlplug.training.samples.token_capture import TokenCapture
from rlplug.training.step_rows import FetchedRows, StepRows


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
class MicroBatchRunner:
    """Runs models over micro-batches, which ``plan`` spreads over ranks. Every method is collective."""

    plan: BatchPlan
    strategy: RLFSDP2Strategy
    capture: TokenCapture | None = None
    """Keeps values of single tokens for the token log."""

    def fetch(self, rows: StepRows, row_indices: Sequence[int], kind: PassKind) -> FetchedRows:
        """Bring some rows of a step to the ranks that compute them."""
        return rows.fetch(self.plan.passes(row_indices, rows.lengths, kind))

    @torch.no_grad()
    def forward_only(self, fetched: FetchedRows, forward: Callable[[PackedMicroBatch], ForwardOutput]) -> ForwardOutput:
        """Return the outputs of ``forward`` for the tokens of this rank's own rows."""
        PHASE_PROGRESS.expect(len(fetched.micro_batches), "passes")
        outputs = []
        for micro_batch in fetched.micro_batches:
            outputs.append(forward(self._load(fetched, micro_batch)))
            PHASE_PROGRESS.advance(1)

        def at_home(parts: Sequence[Tensor | None]) -> Tensor | None:
            present = [part for part in parts if part is not None]
            return fetched.send_home(present) if present else None

        return ForwardOutput(
            _tokens_at_home(fetched, [output.tokens for output in outputs]),
            at_home([output.ref_logprobs for output in outputs]),
            at_home([output.values for output in outputs]),
        )

    def forward_backward(
        self,
        rows: StepRows,
        row_indices: Sequence[int],
        loss: TrainingLoss,
        backward: Callable[[Tensor], None],
        denominators: Denominators | None = None,
    ) -> MiniBatchResult:
        """Run one mini-batch's forward and backward passes; gradients are reduced over ranks in the last one.

        Args:
            rows: The rows of the step.
            row_indices: Rows of the mini-batch.
            loss: What is minimised.
            backward: Runs the backward pass of a loss.
            denominators: What divides the loss; by default the counts of the mini-batch.
        """
        denominators = denominators or rows.denominators(row_indices)
        fetched = self.fetch(rows, row_indices, "update")
        PHASE_PROGRESS.expect(len(fetched.micro_batches), "passes")
        metrics, maxima, minima, tokens = [], [], [], []
        for index, micro_batch in enumerate(fetched.micro_batches):
            for model in loss.models:
                self.strategy.set_last_micro_batch(model.module, is_last=index == len(fetched.micro_batches) - 1)
            share = loss.compute(self._load(fetched, micro_batch), denominators)
            backward(share.output.loss)
            metrics.append(_detached(share.output.metrics))
            maxima.append(_detached(share.output.maxima))
            minima.append(_detached(share.output.minima))
            tokens.append(share.tokens and share.tokens.detach())
            if self.capture is not None:
                self.capture.add(rows, micro_batch, share)
            PHASE_PROGRESS.advance(1)
        return MiniBatchResult(
            metrics=self._reduce(loss.call, metrics, torch.sum, dist.ReduceOp.SUM),
            maxima=self._reduce(loss.call, maxima, torch.amax, dist.ReduceOp.MAX),
            minima=self._reduce(loss.call, minima, torch.amin, dist.ReduceOp.MIN),
            tokens=_tokens_at_home(fetched, tokens) if self.plan.is_on_policy else None,
        )

    def _load(self, fetched: FetchedRows, micro_batch: MicroBatch) -> PackedMicroBatch:
        """Pack the micro-batch's rows, this rank's part of them, and put them on the device."""
        strategy = self.strategy
        batch = fetched.select(micro_batch)
        packed = pack_batch(batch, strategy.sequence_rank, strategy.sequence_size, strategy.sequence_group)
        return packed.to(strategy.root_device)

    def _reduce(
        self, call: PluginCall, parts: Sequence[dict[str, Tensor]], function: Callable[..., Tensor], operation: Any
    ) -> dict[str, float]:
        """Reduce each name over micro-batches and ranks."""
        check_same_names(call, parts)
        if not parts[0]:
            return {}
        values = function(torch.stack([torch.stack([*part.values()]).float() for part in parts]), dim=0)
        if self.strategy.data_size > 1:
            dist.all_reduce(values, operation, group=self.strategy.data_group)
        return dict(zip(parts[0], values.tolist(), strict=True))


def _tokens_at_home(fetched: FetchedRows, parts: Sequence[TokenLogprobs | None]) -> TokenLogprobs | None:
    present = [part for part in parts if part is not None]
    if not present:
        return None
    return TokenLogprobs(
        fetched.send_home([part.logprobs for part in present]),
        fetched.send_home([part.sampled_logprobs for part in present]),
    )


def _detached(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in metrics.items()}
