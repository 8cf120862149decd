"""The update: forward-only passes, and epochs x mini-batches x micro-batches of gradient steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlplug.batching import BatchPlan, MicroBatch
from rlplug.interfaces.algorithm import Algorithm, Denominators
from rlplug.ops.masking import masked_sum
from rlplug.policy import EntropyMode, PolicyOutput, policy_forward
from rlplug.strategy import RLFSDP2Strategy
from rlplug.types import Batch, SamplingParams


class NonFiniteUpdate(Exception):
    """A loss or gradient was NaN or infinite; the weights are those from before that optimizer step."""


@dataclass
class PolicyUpdate:
    """What the passes over a step's batch need; rows of the batch are spread over ranks by the plan."""

    policy: nn.Module
    algorithm: Algorithm
    plan: BatchPlan
    strategy: RLFSDP2Strategy
    sampling: SamplingParams
    hook: Any
    max_grad_norm: float | None
    skip_nonfinite: bool
    seed: int

    @torch.no_grad()
    def forward_only(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return ``logprobs`` and ``sampled_logprobs`` of ``model``, float32 [B, T] on the CPU, on every rank."""
        outputs = []
        for micro in self._micro_batches(range(batch.num_sequences), batch):
            outputs.append((micro, policy_forward(model, self._load(batch, micro), self.sampling, "none")))
        return (
            self._assemble([(micro, output.logprobs) for micro, output in outputs], batch),
            self._assemble([(micro, output.sampled_logprobs) for micro, output in outputs], batch),
        )

    def run(
        self, batch: Batch, optimizer: Any, backward: Callable[[Tensor], None], step: int
    ) -> tuple[dict[str, float], Tensor]:
        """Update the policy on the whole batch of ``step``.

        Returns:
            Metrics, averaged over the step's optimizer steps; and the ``sampled_logprobs`` float32 [B, T] of the
            policy, which are those of the sampling policy when the update is exactly on-policy.

        Raises:
            NonFiniteUpdate: A loss or gradient is not finite, unless such optimizer steps are to be skipped.
        """
        totals: dict[str, float] = {}
        outputs: list[tuple[MicroBatch, Tensor]] = []
        num_updates = num_skipped = 0
        for epoch in range(self.plan.num_epochs):
            for rows in self.plan.mini_batches(batch.num_sequences, epoch, self.seed + step):
                metrics, seen = self._accumulate_gradients(rows, batch, backward)
                metrics["policy/grad_norm"] = self.strategy.clip_grad_norm(self.policy, self.max_grad_norm)
                outputs = seen if self.plan.is_on_policy else []
                if math.isfinite(metrics["loss"]) and math.isfinite(metrics["policy/grad_norm"]):
                    optimizer.step()
                    num_updates += 1
                    totals = {name: totals.get(name, 0.0) + value for name, value in metrics.items()}
                elif self.skip_nonfinite:
                    num_skipped += 1
                else:
                    raise NonFiniteUpdate(f"loss {metrics['loss']}, gradient norm {metrics['policy/grad_norm']}")
                optimizer.zero_grad()
        metrics = {name: value / num_updates for name, value in totals.items()}
        metrics["policy/skipped_updates"] = num_skipped
        return metrics, self._assemble(outputs, batch)

    def _accumulate_gradients(
        self, rows: Sequence[int], batch: Batch, backward: Callable[[Tensor], None]
    ) -> tuple[dict[str, float], list[tuple[MicroBatch, Tensor]]]:
        """Run one mini-batch's forward and backward passes; gradients meet over ranks in the last one."""
        denominators = mini_batch_denominators(batch, rows)
        micro_batches = self._micro_batches(rows, batch)
        entropy: EntropyMode = "gradient" if self.algorithm.needs.entropy_gradient else "value"
        metrics: dict[str, Tensor] = {}
        outputs: list[tuple[MicroBatch, Tensor]] = []
        for index, micro in enumerate(micro_batches):
            rows_here = self._load(batch, micro)
            self.strategy.set_gradient_sync(self.policy, enabled=index == len(micro_batches) - 1)
            output = policy_forward(self.policy, rows_here, self.sampling, entropy)
            share = self._loss(rows_here, output, denominators)
            backward(share["loss"])
            for name, value in share.items():
                metrics[name] = metrics.get(name, torch.zeros((), device=value.device)) + value.detach()
            outputs.append((micro, output.sampled_logprobs))
        return self._sum_over_ranks(metrics), outputs

    def _loss(self, micro_batch: Batch, output: PolicyOutput, denominators: Denominators) -> dict[str, Tensor]:
        """Return this micro-batch's share of the loss and of each metric."""
        if micro_batch.old_logprobs is None:
            micro_batch = micro_batch.replace(old_logprobs=output.logprobs.detach())
        result = self.hook.rlplug_compute_loss(
            algorithm=self.algorithm,
            micro_batch=micro_batch,
            logprobs=output.logprobs,
            entropy=output.entropy,
            values=None,
            denominators=denominators,
        )
        entropy = masked_sum(output.entropy.detach(), micro_batch.response_mask) / max(denominators.num_tokens, 1)
        return {"loss": result.loss, "policy/entropy": entropy, **result.metrics}

    def _micro_batches(self, rows: Sequence[int], batch: Batch) -> list[MicroBatch]:
        return self.plan.micro_batches(rows, batch.lengths, self.strategy.global_rank)

    def _load(self, batch: Batch, micro: MicroBatch) -> Batch:
        rows = batch.select(micro.indices)
        if micro.is_filler:
            rows = rows.replace(response_mask=torch.zeros_like(rows.response_mask))
        return rows.to(self.strategy.root_device)

    def _assemble(self, outputs: Sequence[tuple[MicroBatch, Tensor]], batch: Batch) -> Tensor:
        """Put rows from all micro-batches and ranks back in their places: float32 [B, T] on the CPU."""
        whole = torch.zeros(batch.input_ids.shape, dtype=torch.float32, device=self.strategy.root_device)
        for micro, values in outputs:
            if not micro.is_filler:
                whole[list(micro.indices), : values.shape[1]] = values.float()
        if self.plan.world_size > 1:
            dist.all_reduce(whole)
        return whole.cpu()

    def _sum_over_ranks(self, metrics: dict[str, Tensor]) -> dict[str, float]:
        values = torch.stack([value.float() for value in metrics.values()])
        if self.plan.world_size > 1:
            dist.all_reduce(values)
        return dict(zip(metrics, values.tolist(), strict=True))


def mini_batch_denominators(batch: Batch, rows: Sequence[int]) -> Denominators:
    """Count what trains in ``rows`` of the step's batch; every rank holds the batch, so no rank need be asked."""
    tokens = batch.response_mask[list(rows)].sum(dim=1)
    return Denominators(num_tokens=int(tokens.sum()), num_sequences=int((tokens > 0).sum()))
