"""The token log of a run: what its passes compute for single tokens, in files of its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from rlplug.config import RunConfig
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.interfaces.token_log import TokenLog, TokenLogOptions
from rlplug.types import Sample, StepBatch
from rlplug_watch.token_log.capture import TokenCapture
from rlplug_watch.token_log.files import FOLDER, TokenLogWriter, cut_back
from rlplug_watch.token_log.pieces import TokenPieces
from rlplug_watch.token_log.step_tokens import StepTokens


class FileTokenLog(TokenCapture, TokenLog):
    """Token log in the folder ``tokens/`` of a run, which rank 0 writes.

    Args:
        folder: The run's folder.
        options: What the run wants.
        config: Options of the run.
        strategy: Exchanges arrays between ranks.
        tokenizer: Tokenizer of the policy.
    """

    def __init__(
        self,
        folder: Path,
        options: TokenLogOptions,
        config: RunConfig,
        strategy: RLFSDP2Strategy,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        has_logprobs, is_truncated = config.engine.capabilities.logprobs, config.sampling.is_truncated
        super().__init__(options.samples_per_step, options.every_n_steps, has_logprobs, is_truncated)
        self._writer = TokenLogWriter(folder / FOLDER, options.most_bytes)
        self._strategy = strategy
        self._tokenizer = tokenizer
        self._pieces: TokenPieces | None = None

    def write(self, step: int, chosen: NDArray[Any], samples: Sequence[Sample], batch: StepBatch) -> None:
        rows, columns = self.collect(chosen, samples, batch, self._strategy)
        if self._strategy.is_global_zero:
            self._pieces = self._pieces or TokenPieces(self._tokenizer)
            pieces = self._pieces.of(columns["token_ids"].tolist())
            self._writer.append(StepTokens(step, rows, columns, pieces))

    def sync(self) -> None:
        self._writer.sync()

    def cut_back(self, step: int, aside: Path | None) -> list[str]:
        return cut_back(self._writer.folder, step, aside)
