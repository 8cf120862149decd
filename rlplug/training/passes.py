"""Passes over the rows of a step, on the ranks that the batch plan chose for them."""

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
from rlplug.training.actor_critic import ForwardOutput
from rlplug.training.batch_plan import BatchPlan, MicroBatch, PassKind
from rlplug.training.step_rows import FetchedRows, StepRows

if TYPE_CHECKING:
    from rlplug.interfaces.token_log import TokenLog


@dataclass(frozen=True)
class MicroBatchRunner:
    """Brings micro-batches, which ``plan`` spreads over ranks, to the device. All but ``load`` is collective."""

    plan: BatchPlan
    strategy: RLFSDP2Strategy
    token_log: TokenLog | None = None
    """Gets values of single tokens."""

    def fetch(self, rows: StepRows, row_indices: Sequence[int], kind: PassKind) -> FetchedRows:
        """Bring some rows of a step to the ranks that compute them."""
        return rows.fetch(self.plan.passes(row_indices, rows.lengths, kind))

    def load(self, fetched: FetchedRows, micro_batch: MicroBatch) -> PackedMicroBatch:
        """Pack the micro-batch's rows, this rank's part of them, and put them on the device."""
        strategy = self.strategy
        rows = fetched.select(micro_batch)
        packed = pack(rows, strategy.sequence_rank, strategy.sequence_size, strategy.sequence_group)
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
