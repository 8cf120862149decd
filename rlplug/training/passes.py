"""Passes over the rows of a step, on the ranks that the batch plan chose for them, and the phase ``logprobs``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.models.lm_head import TokenLogprobs
from rlplug.models.packing import PackedMicroBatch, pack
from rlplug.observability.phase_progress import PHASE_PROGRESS
from rlplug.training.actor_critic import ActorCritic, ForwardOutput
from rlplug.training.batch_plan import BatchPlan, MicroBatch, PassKind
from rlplug.training.step_rows import FetchedRows, StepRows
from rlplug.types import StepBatch

if TYPE_CHECKING:
    from rlplug.distributed.offload import Offload
    from rlplug.interfaces.token_log import TokenLog


@dataclass(frozen=True)
class MicroBatchRunner:
    """Brings micro-batches, which ``plan`` spreads over ranks, to the device. All but ``load`` is collective."""

    plan: BatchPlan
    strategy: RLFSDP2Strategy
    token_log: TokenLog | None = None
    """Gets values of single tokens."""

    def rows_of(self, batch: StepBatch) -> StepRows:
        """Return the rows of a step, of which ``batch`` is this rank's."""
        return StepRows(batch, self.strategy, self.plan.layout)

    def fetch(self, rows: StepRows, row_indices: Sequence[int], kind: PassKind) -> FetchedRows:
        """Bring some rows of a step to the ranks that compute them."""
        return rows.fetch(self.plan.passes(row_indices, rows.lengths, kind, rows.table))

    def load(self, fetched: FetchedRows, micro_batch: MicroBatch) -> PackedMicroBatch:
        """Pack the micro-batch's rows, this rank's part of them, and put them on the device."""
        strategy = self.strategy
        rows = fetched.select(micro_batch)
        pack_rows = pack if self.plan.layout is None else self.plan.layout.pack
        packed = pack_rows(rows, strategy.sequence_rank, strategy.sequence_size, strategy.sequence_group)
        return packed.to(strategy.root_device)

    @torch.no_grad()
    def forward_only(self, fetched: FetchedRows, forward: Callable[[PackedMicroBatch], ForwardOutput]) -> ForwardOutput:
        """Return the outputs of ``forward`` for the tokens of this rank's own rows."""
        PHASE_PROGRESS.expect(len(fetched.micro_batches), "passes")
        outputs = []
        for micro_batch in fetched.micro_batches:
            outputs.append(forward(self.load(fetched, micro_batch)))
            PHASE_PROGRESS.advance(1)

        def gathered(parts: Sequence[Tensor | None]) -> Tensor | None:
            present = [part for part in parts if part is not None]
            return fetched.gather_back(present) if present else None

        return ForwardOutput(
            gather_logprobs(fetched, [output.tokens for output in outputs]),
            gathered([output.ref_logprobs for output in outputs]),
            gathered([output.values for output in outputs]),
        )


def gather_logprobs(fetched: FetchedRows, parts: Sequence[TokenLogprobs | None]) -> TokenLogprobs | None:
    """Return the logprobs of this rank's own rows, float32 [N], from those of each micro-batch; ``None`` of none."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    return TokenLogprobs(
        fetched.gather_back([part.logprobs for part in present]),
        fetched.gather_back([part.sampled_logprobs for part in present]),
    )


def compute_logprobs(
    batch: StepBatch, models: ActorCritic, runner: MicroBatchRunner, offload: Offload, step: int, always: bool
) -> tuple[StepBatch, TokenLogprobs | None]:
    """Return the batch with ``old_logprobs``, ``ref_logprobs`` and ``values``, and the policy's logprobs if it ran.

    Args:
        batch: This rank's rows of the step.
        models: Models of the run.
        runner: Runs them over micro-batches.
        offload: Copies the reference policy to the device.
        step: Number of the step, from 1.
        always: Run the policy even where its one update computes the same logprobs anyway.
    """
    tokens = None
    needs_old_logprobs = models.needs_old_logprobs(step, runner.plan.is_on_policy)
    runs_policy = always or needs_old_logprobs or models.shares_trunk
    if not runs_policy and models.reference is None and models.critic is None:
        return batch, None
    rows = runner.rows_of(batch)
    fetched = runner.fetch(rows, range(rows.num_sequences), "forward")
    if runs_policy:
        output = runner.forward_only(fetched, models.forward_policy)
        tokens = output.tokens
        assert tokens is not None
        batch = batch.with_tokens(old_logprobs=tokens.logprobs if needs_old_logprobs else None, values=output.values)
    if models.reference is not None:
        with offload.reference_on_device():
            output = runner.forward_only(fetched, models.forward_reference)
            batch = batch.with_tokens(ref_logprobs=output.ref_logprobs)
    if models.critic is not None and "values" not in batch.per_token:
        if runner.plan.has_critic_budget:
            fetched = runner.fetch(rows, range(rows.num_sequences), "critic_forward")
        batch = batch.with_tokens(values=runner.forward_only(fetched, models.forward_critic).values)
    return batch, tokens
