"""``Validator``: scores the held-out prompts between two steps, or beside the step that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

from lightning.fabric.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_warn

from rlplug.data.datamodule import PromptDataModule
from rlplug.distributed.stop_signal import StopRequested
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.interfaces.observer import Validation
from rlplug.rewards import RewardRunner
from rlplug.rollout.source import RolloutRequest, RolloutSource
from rlplug.training.samples.metrics import sample_table
from rlplug.training.validation.config import ValidationConfig
from rlplug.training.validation.scores import validation_by_source
from rlplug.types import Rollout, Sample


def log_late(loggers: Sequence[Logger], scores: Mapping[str, float], step: int) -> None:
    """Log scores of a validation at its step, after metrics of that step were logged."""
    for logger in loggers:
        logger.log_metrics(dict(scores), step=step)


class Validator:
    """Generates and scores the held-out prompts, at the steps that the settings name. Every method is collective.

    Args:
        config: Settings.
        held_out: How the held-out prompts are sampled, without the prompts and the version.
        source: Generates completions.
        data: Has the held-out prompts.
        score: Returns this rank's samples with their rewards.
        rewards: Stop the run when too many samples have none.
        ranks: Gathers what all ranks have.
        phase: Makes a context that times a phase of the step, by its name.
    """

    def __init__(
        self,
        config: ValidationConfig,
        held_out: RolloutRequest,
        source: RolloutSource,
        data: PromptDataModule,
        score: Callable[[list[Sample]], list[Sample]],
        rewards: RewardRunner,
        ranks: RLFSDP2Strategy,
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._config, self._held_out = config, held_out
        self._source, self._data = source, data
        self._score, self._rewards, self._ranks = score, rewards, ranks
        self._phase = phase
        self._metrics: dict[str, float] = {}
        self.was_cut = False
        """Whether a run that was told to stop left out the newest validation, which is due when it is resumed."""

    def begin_step(self, num_steps: int, version: int) -> None:
        """Let the engine generate held-out prompts beside the groups of the step that begins, if that is due."""
        if self._config.beside_training and self._is_due(num_steps):
            self._source.begin_held_out(self._request(version))

    def end_step(self, num_steps: int, version: int, is_last: bool) -> list[Validation]:
        """Score the policy before the step, if the engine was told so by :meth:`begin_step`, and the one after, if due.

        A run that is told to stop meanwhile gets those that have ended, and :attr:`was_cut` says that one is missing.

        Args:
            num_steps: Steps done; 0 before the first.
            version: Version of the policy.
            is_last: Whether no step follows, beside which the engine could generate.
        """
        ended: list[Validation] = []
        is_due, is_lost = self._is_due(num_steps), False
        self.was_cut = True
        with suppress(StopRequested):
            if self._source.has_held_out:
                with self._phase("validate"):
                    of_step_before = self._finish(num_steps - 1)
                ended += [] if of_step_before is None else [of_step_before]
                is_lost = of_step_before is None
            waits = is_due and self._config.beside_training and not is_last
            if (is_due or is_lost) and not waits:
                with self._phase("validate"):
                    ended.append(self.run(num_steps, version))
            self.was_cut = False
        return ended

    def run(self, num_steps: int, version: int) -> Validation:
        """Generate the held-out prompts with the newest weights, and score the policy after ``num_steps`` steps."""
        self._metrics = self._source.pop_metrics()
        self._source.sync_weights(version)
        validation = self._scored(self._source.generate(self._request(version)), num_steps)
        of_sync = {name: value for name, value in self._source.pop_metrics().items() if name.startswith("sync/")}
        self._metrics |= of_sync
        return validation

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of the rollout before a validation, with the validation's ``sync/...`` in place of its.

        What the log has as ``rollout/...`` and ``environment/...`` is of the training rollout.
        """
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _is_due(self, num_steps: int) -> bool:
        return self._config.is_due(num_steps) and bool(self._data.val_prompts)

    def _finish(self, num_steps: int) -> Validation | None:
        """Wait for the prompts of :meth:`begin_step`, and score the policy after ``num_steps`` steps.

        Returns:
            ``None`` where an engine failed after the update of the step beside it: those weights are gone.
        """
        try:
            samples = self._source.finish_held_out(self._config.num_samples)
        except StopRequested:
            rank_zero_warn(
                f"The validation after step {num_steps} is left out: the run was told to stop before its end."
            )
            raise
        if samples is None:
            rank_zero_warn(
                f"The validation after step {num_steps} is left out: an engine failed during it, and the weights have "
                f"changed since. There is one after step {num_steps + 1} instead."
            )
            return None
        return self._scored(samples, num_steps)

    def _request(self, version: int) -> RolloutRequest:
        return replace(self._held_out, prompts=self._data.val_prompts, policy_version=version)

    def _scored(self, samples: list[Sample], num_steps: int) -> Validation:
        samples = self._score(samples)
        self._rewards.check(samples, self._ranks)
        names, sources = self._rewards.names, self._data.val_sources
        table = sample_table(Rollout(tuple(samples)), names, self._ranks.gather_arrays, sources)
        scores = validation_by_source(table, names, self._config.pass_threshold, sources)
        return Validation(num_steps, samples, scores)
