"""Forward and backward passes over a step's batch: which rank computes which rows, and how results are assembled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.interfaces.algorithm import Denominators
from rlplug.interfaces.router_replay import NOT_RECORDED
from rlplug.models.lm_head import TokenLogprobs
from rlplug.models.packing import PackedMicroBatch, pack_batch
from rlplug.observability.phase_progress import PHASE_PROGRESS
from rlplug.training.actor_critic import ForwardOutput
from rlplug.training.batch_plan import BatchPlan, MicroBatch, PassKind
from rlplug.training.losses import TrainingLoss
from rlplug.types import Batch


@dataclass(frozen=True)
class MiniBatchResult:
    """Measurements of the passes over a mini-batch, reduced over micro-batches and ranks."""

    metrics: dict[str, float]
    maxima: dict[str, float]
    minima: dict[str, float]
    tokens: TokenLogprobs | None
    """float32 [B, T] on the CPU, of the policy before the update; ``None`` where one mini-batch is not the whole step,
    or the policy did not run"""


@dataclass(frozen=True)
class MicroBatchRunner:
    """Runs models over micro-batches, which ``plan`` spreads over ranks. Every method is collective."""

    plan: BatchPlan
    strategy: RLFSDP2Strategy

    @torch.no_grad()
    def forward_only(self, batch: Batch, forward: Callable[[PackedMicroBatch], ForwardOutput]) -> ForwardOutput:
        """Return the outputs of ``forward``, assembled: float32 [B, T] on the CPU, on every rank."""
        micro_batches = self._micro_batches(range(batch.num_sequences), batch, "forward")
        PHASE_PROGRESS.expect(len(micro_batches), "passes")
        outputs = []
        for micro_batch in micro_batches:
            outputs.append(forward(self._load(batch, micro_batch)))
            PHASE_PROGRESS.advance(1)

        def assembled(parts: Sequence[Tensor | None]) -> Tensor | None:
            present = [part for part in parts if part is not None]
            return self._assemble(batch, micro_batches, present) if present else None

        return ForwardOutput(
            self._assemble_tokens(batch, micro_batches, [output.tokens for output in outputs]),
            assembled([output.ref_logprobs for output in outputs]),
            assembled([output.values for output in outputs]),
        )

    def forward_backward(
        self, batch: Batch, row_indices: Sequence[int], loss: TrainingLoss, backward: Callable[[Tensor], None]
    ) -> MiniBatchResult:
        """Run one mini-batch's forward and backward passes; gradients are reduced over ranks in the last one."""
        denominators = mini_batch_denominators(batch, row_indices)
        micro_batches = self._micro_batches(row_indices, batch, "update")
        PHASE_PROGRESS.expect(len(micro_batches), "passes")
        metrics, maxima, minima, tokens = [], [], [], []
        for index, micro_batch in enumerate(micro_batches):
            for model in loss.models:
                self.strategy.set_last_micro_batch(model.module, is_last=index == len(micro_batches) - 1)
            share = loss.compute(self._load(batch, micro_batch), denominators)
            backward(share.output.loss)
            metrics.append(_detached(share.output.metrics))
            maxima.append(_detached(share.output.maxima))
            minima.append(_detached(share.output.minima))
            tokens.append(share.tokens and share.tokens.detach())
            PHASE_PROGRESS.advance(1)
        return MiniBatchResult(
            metrics=self._reduce(metrics, torch.sum, dist.ReduceOp.SUM),
            maxima=self._reduce(maxima, torch.amax, dist.ReduceOp.MAX),
            minima=self._reduce(minima, torch.amin, dist.ReduceOp.MIN),
            tokens=self._assemble_tokens(batch, micro_batches, tokens) if self.plan.is_on_policy else None,
        )

    def _micro_batches(self, row_indices: Sequence[int], batch: Batch, kind: PassKind) -> list[MicroBatch]:
        return self.plan.micro_batches(row_indices, batch.lengths, self.strategy.data_rank, kind)

    def _load(self, batch: Batch, micro_batch: MicroBatch) -> PackedMicroBatch:
        """Pack the micro-batch's rows, this rank's part of them, and put them on the device."""
        rows, strategy = batch.select(micro_batch.indices), self.strategy
        if micro_batch.is_filler:
            rows = rows.replace(response_mask=torch.zeros_like(rows.response_mask))
            if rows.routed_experts is not None:
                rows = rows.replace(routed_experts=torch.full_like(rows.routed_experts, NOT_RECORDED))
        packed = pack_batch(rows, strategy.sequence_rank, strategy.sequence_size, strategy.sequence_group)
        return packed.to(strategy.root_device)

    def _assemble_tokens(
        self, batch: Batch, micro_batches: Sequence[MicroBatch], parts: Sequence[TokenLogprobs | None]
    ) -> TokenLogprobs | None:
        present = [part for part in parts if part is not None]
        if not present:
            return None
        return TokenLogprobs(
            self._assemble(batch, micro_batches, [part.logprobs for part in present]),
            self._assemble(batch, micro_batches, [part.sampled_logprobs for part in present]),
        )

    def _assemble(self, batch: Batch, micro_batches: Sequence[MicroBatch], tensors: Sequence[Tensor]) -> Tensor:
        """Put rows from all micro-batches and ranks back in their places: float32 [B, T] on the CPU."""
        whole = torch.zeros(batch.input_ids.shape, dtype=torch.float32, device=self.strategy.root_device)
        for micro_batch, tensor in zip(micro_batches, tensors, strict=True):
            if not micro_batch.is_filler:
                whole[list(micro_batch.indices), : tensor.shape[1]] = tensor.float()
        if self.strategy.data_size > 1:
            dist.all_reduce(whole, group=self.strategy.data_group)
        return whole.cpu()

    def _reduce(
        self, parts: Sequence[dict[str, Tensor]], function: Callable[..., Tensor], operation: Any
    ) -> dict[str, float]:
        """Reduce each name over micro-batches and ranks."""
        if not parts[0]:
            return {}
        values = function(torch.stack([torch.stack([*part.values()]).float() for part in parts]), dim=0)
        if self.strategy.data_size > 1:
            dist.all_reduce(values, operation, group=self.strategy.data_group)
        return dict(zip(parts[0], values.tolist(), strict=True))


def mini_batch_denominators(batch: Batch, row_indices: Sequence[int]) -> Denominators:
    """Count what trains in a mini-batch; every rank holds the step's batch, so no rank has to be asked."""
    tokens = batch.response_mask[list(row_indices)].sum(dim=1)
    return Denominators(
        num_tokens=int(tokens.sum()),
        num_sequences=int((tokens > 0).sum()),
        num_routed=num_routed(batch, row_indices),
    )


def num_routed(batch: Batch, row_indices: Sequence[int]) -> int:
    """Count the (token, layer) pairs of some sequences whose experts are known; 0 without router replay."""
    if batch.routed_experts is None:
        return 0
    ends = np.cumsum([0, *batch.lengths])
    is_known = batch.routed_experts[:, 0, 0].numpy() != NOT_RECORDED  # a token has experts in all layers, or in none
    num_tokens = sum(int(is_known[ends[row] : ends[row + 1]].sum()) for row in row_indices)
    return num_tokens * batch.routed_experts.shape[1]


def _detached(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in metrics.items()}
