"""Settings of validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rlplug.errors import ConfigError
from rlplug.types import SamplingParams
from rlplug.types.ranges import Range, RewardValue, Steps, Tokens, check_ranges


@dataclass(frozen=True)
class ValidationSampling(SamplingParams):
    """How the completions of a validation are drawn.

    Args:
        max_new_tokens: Longest completion, in tokens; by default, and at most, that of ``model.sampling``.
    """

    max_new_tokens: Tokens | None = None  # type: ignore[assignment]  # ValidationConfig.sampling_of fills it in


@dataclass
class ValidationConfig:
    """Settings of validation on held-out prompts.

    Args:
        every_n_steps: Validate after every n steps of ``fit``; never by default.
        at_start: Validate also before the first step.
        num_samples: Completions per prompt; metrics are ``pass@k`` for k = 1, 2, 4, ... up to it.
        sampling: How completions are drawn; greedy by default, which goes with one sample.
        pass_threshold: A completion passes when its reward is at least this.
        beside_training: Generate the held-out prompts beside the next step of an asynchronous rollout, with the weights
            that the step sends, instead of between two steps. That step waits at its end until they are complete. Their
            scores are logged at the step after which they are due.
    """

    every_n_steps: Steps | None = None
    at_start: bool = False
    num_samples: Annotated[int, Range(1, 100_000)] = 1
    sampling: ValidationSampling | None = None
    pass_threshold: RewardValue = 1.0
    beside_training: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, "model.validation")
        if self.num_samples > 1 and (self.sampling is None or self.sampling.is_greedy):
            raise ConfigError(
                f"model.validation.num_samples is {self.num_samples}, and greedy completions of a prompt are all the "
                "same. Set model.validation.sampling.temperature above 0, or num_samples to 1."
            )

    def is_due(self, step: int) -> bool:
        """Return whether to validate after ``step`` steps."""
        if step == 0:
            return self.at_start
        return self.every_n_steps is not None and step % self.every_n_steps == 0

    def sampling_of(self, training: SamplingParams) -> SamplingParams:
        """Return how validation completions are drawn in a run whose training completions are drawn so.

        Raises:
            ConfigError: They may be longer than those, for which context and memory are planned.
        """
        given = self.sampling or ValidationSampling(temperature=0.0)
        longest = training.max_new_tokens if given.max_new_tokens is None else given.max_new_tokens
        if longest > training.max_new_tokens:
            raise ConfigError(
                f"model.validation.sampling.max_new_tokens is {longest}, and context and memory are planned for "
                f"model.sampling.max_new_tokens, {training.max_new_tokens}: give at most that, or raise it."
            )
        if given.stop not in ((), training.stop):
            raise ConfigError("model.validation.sampling.stop has no effect: model.sampling.stop ends completions.")
        return SamplingParams(**{**vars(given), "max_new_tokens": longest, "stop": training.stop})
