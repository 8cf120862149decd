"""What a run writes of its samples: lines of ``samples.jsonl``, and the tokens of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlplug.distributed.durable_files import RowFile
from rlplug.observability.sample_records import (
    gather_samples,
    sample_record,
    sample_rows,
    spread,
    with_turns,
    write_records,
)
from rlplug.types import Sample, StepBatch


class SampleLog:
    """Writes samples of the steps of a run.

    Args:
        samples_per_step: Samples of each step, from worst to best.
        lines: ``samples.jsonl``.
    """

    def __init__(self, samples_per_step: int, lines: RowFile) -> None:
        self._samples_per_step = samples_per_step
        self._lines = lines

    def write(
        self, phase: str, step: int, samples: Sequence[Sample], batch: StepBatch | None, module: Any
    ) -> list[Sample]:
        """Write some samples of a step, and the tokens of some; return those from worst to best. Collective.

        Rank 0 writes. Samples of which the tokens are written have a line too.

        Args:
            phase: ``train`` or ``validate``.
            step: Number of the step.
            samples: This rank's samples.
            batch: Their rows, as they trained; ``None`` where they did not.
            module: The :class:`RLModule`.

        Raises:
            RunError: A file cannot be written.
        """
        strategy = module.strategy
        rows = sample_rows(samples, strategy)
        with_tokens = rows[:0]
        if batch is not None and module.token_log is not None:
            with_tokens = module.token_log.choose(rows)
            if len(with_tokens):
                module.token_log.write(step, with_tokens, samples, batch)
        shown = spread(rows, self._samples_per_step)
        written = np.concatenate([shown, with_tokens[~np.isin(with_tokens, shown)]])
        advantages = None if batch is None else batch.per_sequence.get("advantages")
        found = gather_samples(written, samples, advantages, strategy)
        if strategy.is_global_zero:
            found = [(with_turns(sample, module.inputs.tokenizer), advantage) for sample, advantage in found]
            has_tokens = np.isin(written, with_tokens).tolist()
            write_records(
                self._lines,
                [
                    sample_record(sample, step, phase, row, has, advantage)
                    for row, has, (sample, advantage) in zip(written, has_tokens, found, strict=True)
                ],
            )
        return [sample for sample, _ in found[: len(shown)]]
