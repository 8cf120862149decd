"""``Validator``: scores the held-out prompts between two steps, or beside the step that follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning.fabric.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_warn

from rlplug.data.datamodule import PromptDataModule
from rlplug.distributed.stop_signal import StopRequested
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.observability.metrics_csv import MetricsCSV
from rlplug.rewards import RewardRunner
from rlplug.rollout.generator import RolloutGenerator, RolloutRequest
from rlplug.training.samples.table import sample_table
from rlplug.training.validation.config import ValidationConfig
from rlplug.training.validation.scores import validation_by_source
from rlplug.types import Rollout, Sample


@dataclass(frozen=True)
class Validation:
    """Scores of the policy after a step."""

    step: int
    samples: Sequence[Sample]
    """This rank's, with rewards."""
    scores: dict[str, float]
    """``validate/...`` over the samples of all ranks."""

    def log_late(self, loggers: Sequence[Logger]) -> None:
        """Log the scores at their step, after metrics of that step were logged."""
        for logger in loggers:
            log = logger.amend if isinstance(logger, MetricsCSV) else logger.log_metrics
            log(self.scores, step=self.step)


class Validator:
    """Generates and scores the held-out prompts. Every method but :meth:`is_due` is collective.

    Args:
        config: Settings.
        max_new_tokens: Longest completion, in tokens.
        seed: The run's seed.
        data: Has the held-out prompts.
        generator: Generates completions.
        score: Returns this rank's samples with their rewards.
        rewards: Stop the run when too many samples have none.
        ranks: Gathers what all ranks have.
    """

    def __init__(
        self,
        config: ValidationConfig,
        max_new_tokens: int,
        seed: int,
        data: PromptDataModule,
        generator: RolloutGenerator,
        score: Callable[[list[Sample]], list[Sample]],
        rewards: RewardRunner,
        ranks: RLFSDP2Strategy,
    ) -> None:
        self._config, self._max_new_tokens, self._seed = config, max_new_tokens, seed
        self._data, self._generator = data, generator
        self._score, self._rewards, self._ranks = score, rewards, ranks

    def is_due(self, step: int) -> bool:
        """Return whether to validate the policy after ``step`` steps."""
        return self._config.is_due(step) and bool(self._data.val_prompts)

    @property
    def is_running(self) -> bool:
        """Whether held-out prompts are generated beside a step."""
        return self._generator.has_held_out

    def begin_beside(self, version: int) -> None:
        """Let the engine generate the held-out prompts beside the groups of the step that begins."""
        self._generator.begin_held_out(self._request(version))

    def finish_beside(self, step: int) -> Validation | None:
        """Wait for the prompts of :meth:`begin_beside`, and score the policy after ``step`` steps.

        Returns:
            ``None`` where an engine failed after the update of the step beside it: the weights of ``step`` are gone.
        """
        try:
            samples = self._generator.finish_held_out(self._config.num_samples)
        except StopRequested:
            rank_zero_warn(f"The validation after step {step} is left out: the run was told to stop before its end.")
            raise
        if samples is None:
            rank_zero_warn(
                f"The validation after step {step} is left out: an engine failed during it, and the weights have "
                f"changed since. There is one after step {step + 1} instead."
            )
            return None
        return self._scored(samples, step)

    def run(self, step: int, version: int) -> Validation:
        """Generate the held-out prompts with the newest weights, and score the policy after ``step`` steps."""
        return self._scored(self._generator.generate(self._request(version)), step)

    def _request(self, version: int) -> RolloutRequest:
        prompts, sampling = self._data.val_prompts, self._config.sampling(self._max_new_tokens)
        return RolloutRequest(prompts, self._config.num_samples, sampling, f"validate/{self._seed}", version)

    def _scored(self, samples: list[Sample], step: int) -> Validation:
        samples = self._score(samples)
        self._rewards.check(samples, self._ranks)
        names, sources = self._rewards.names, self._data.val_sources
        table = sample_table(Rollout(tuple(samples)), names, self._ranks.gather_arrays, sources)
        scores = validation_by_source(table, names, self._config.pass_threshold, sources)
        return Validation(step, samples, scores)
