"""What a run writes of its samples: lines of ``samples.jsonl``, and the tokens of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlplug.distributed.durable_files import RowFile
from rlplug.observability.sample_records import (
    SampleRows,
    gather_samples,
    sample_record,
    sample_rows,
    spread,
    write_records,
)
from rlplug.observability.token_log.files import TokenLogWriter
from rlplug.observability.token_log.pieces import TokenPieces
from rlplug.observability.token_log.step_tokens import StepTokens
from rlplug.types import Sample, StepBatch


class SampleLog:
    """Writes samples of the steps of a run.

    Args:
        samples_per_step: Samples of each step, from worst to best.
        lines: ``samples.jsonl``.
        tokens: The token log.
    """

    def __init__(self, samples_per_step: int, lines: RowFile, tokens: TokenLogWriter) -> None:
        self.tokens = tokens
        self._samples_per_step = samples_per_step
        self._lines = lines
        self._pieces: TokenPieces | None = None

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
        if batch is not None and module.token_capture is not None:
            with_tokens = self._write_tokens(step, rows, samples, batch, module)
        shown = spread(rows, self._samples_per_step)
        written = np.concatenate([shown, with_tokens[~np.isin(with_tokens, shown)]])
        advantages = None if batch is None else batch.per_sequence.get("advantages")
        found = gather_samples(written, samples, advantages, strategy)
        if strategy.is_global_zero:
            has_tokens = np.isin(written, with_tokens).tolist()
            write_records(
                self._lines,
                [
                    sample_record(sample, step, phase, row, has, advantage)
                    for row, has, (sample, advantage) in zip(written, has_tokens, found, strict=True)
                ],
            )
        return [sample for sample, _ in found[: len(shown)]]

    def _write_tokens(
        self, step: int, rows: SampleRows, samples: Sequence[Sample], batch: StepBatch, module: Any
    ) -> SampleRows:
        """Write the tokens of some samples, and return the rows of those. Collective."""
        chosen: SampleRows = module.token_capture.choose(rows)
        if len(chosen):
            token_rows, columns = module.token_capture.collect(chosen, samples, batch, module.strategy)
            if module.strategy.is_global_zero:
                self._pieces = self._pieces or TokenPieces(module.inputs.tokenizer)
                pieces = self._pieces.of(columns["token_ids"].tolist())
                self.tokens.append(StepTokens(step, token_rows, columns, pieces))
        return chosen
