"""Passes over rows of a step's batch: which rank computes what, and how results meet again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.interfaces.algorithm import Denominators
from rlplug.models.packing import PackedMicroBatch, pack_batch
from rlplug.training.batch_plan import BatchPlan, MicroBatch, PassKind
from rlplug.training.losses import Objective, Share
from rlplug.types import Batch


@dataclass(frozen=True)
class MiniBatchResult:
    """What the passes over a mini-batch measured, on all ranks."""

    metrics: dict[str, float]
    maxima: dict[str, float]
    minima: dict[str, float]
    sampled_logprobs: Tensor | None
    """float32 [B, T] on the CPU, 0 in rows outside the mini-batch; ``None`` when the policy did not run"""


@dataclass(frozen=True)
class MicroBatchRunner:
    """Runs models over micro-batches, which ``plan`` spreads over ranks. Every method is collective."""

    plan: BatchPlan
    strategy: RLFSDP2Strategy

    @torch.no_grad()
    def forward_only(self, batch: Batch, function: Callable[[PackedMicroBatch], Sequence[Tensor]]) -> list[Tensor]:
        """Return what ``function`` makes of each micro-batch, float32 [B, T] on the CPU, on every rank.

        Args:
            function: Returns any number of [b, t] tensors for the micro-batch that it gets.
        """
        micro_batches = self._micro_batches(range(batch.num_sequences), batch, "forward")
        outputs = [function(self._load(batch, micro)) for micro in micro_batches]
        return [self._assemble(batch, micro_batches, tensors) for tensors in zip(*outputs, strict=True)]

    def accumulate(
        self, batch: Batch, rows: Sequence[int], objective: Objective, backward: Callable[[Tensor], None]
    ) -> MiniBatchResult:
        """Run one mini-batch's forward and backward passes; gradients meet over ranks in the last one."""
        denominators = mini_batch_denominators(batch, rows)
        micro_batches = self._micro_batches(rows, batch, "update")
        shares: list[Share] = []
        for index, micro in enumerate(micro_batches):
            for trainee in objective.trainees:
                self.strategy.set_last_micro_batch(trainee.module, is_last=index == len(micro_batches) - 1)
            share = objective.share(self._load(batch, micro), denominators)
            backward(share.loss)
            shares.append(share.detach())
        sampled = [share.sampled_logprobs for share in shares if share.sampled_logprobs is not None]
        return MiniBatchResult(
            metrics=self._reduce([share.metrics for share in shares], torch.sum, dist.ReduceOp.SUM),
            maxima=self._reduce([share.maxima for share in shares], torch.amax, dist.ReduceOp.MAX),
            minima=self._reduce([share.minima for share in shares], torch.amin, dist.ReduceOp.MIN),
            sampled_logprobs=self._assemble(batch, micro_batches, sampled) if sampled else None,
        )

    def _micro_batches(self, rows: Sequence[int], batch: Batch, phase: PassKind) -> list[MicroBatch]:
        return self.plan.micro_batches(rows, batch.lengths, self.strategy.data_rank, phase)

    def _load(self, batch: Batch, micro: MicroBatch) -> PackedMicroBatch:
        """Pack the micro-batch's rows, this rank's part of them, and put them on the device."""
        rows, strategy = batch.select(micro.indices), self.strategy
        if micro.is_filler:
            rows = rows.replace(response_mask=torch.zeros_like(rows.response_mask))
        packed = pack_batch(rows, strategy.sequence_rank, strategy.sequence_size, strategy.sequence_group)
        return packed.to(strategy.root_device)

    def _assemble(self, batch: Batch, micro_batches: Sequence[MicroBatch], tensors: Sequence[Tensor]) -> Tensor:
        """Put rows from all micro-batches and ranks back in their places: float32 [B, T] on the CPU."""
        whole = torch.zeros(batch.input_ids.shape, dtype=torch.float32, device=self.strategy.root_device)
        for micro, tensor in zip(micro_batches, tensors, strict=True):
            if not micro.is_filler:
                whole[list(micro.indices), : tensor.shape[1]] = tensor.float()
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


def mini_batch_denominators(batch: Batch, rows: Sequence[int]) -> Denominators:
    """Count what trains in ``rows`` of the step's batch; every rank holds the batch, so no rank need be asked."""
    tokens = batch.response_mask[list(rows)].sum(dim=1)
    return Denominators(num_tokens=int(tokens.sum()), num_sequences=int((tokens > 0).sum()))
