"""Settings of validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rlplug.errors import ConfigError
from rlplug.types import SamplingParams
from rlplug.types.ranges import PositiveShare, Range, RewardValue, Steps, check_ranges


@dataclass
class ValidationConfig:
    """Settings of validation on held-out prompts.

    Args:
        every_n_steps: Validate after every n steps of ``fit``; never by default.
        at_start: Validate also before the first step.
        num_samples: Completions per prompt; metrics are ``pass@k`` for k = 1, 2, 4, ... up to it.
        temperature: 0 is greedy, which goes with one sample.
        top_p: As in ``sampling``.
        top_k: As in ``sampling``.
        pass_threshold: A completion passes when its reward is at least this.
        beside_training: Generate the held-out prompts beside the next step of an asynchronous rollout, with the weights
            that the step sends, instead of between two steps. That step waits at its end until they are complete. Their
            scores are logged at the step after which they are due.
    """

    every_n_steps: Steps | None = None
    at_start: bool = False
    num_samples: Annotated[int, Range(1, 100_000)] = 1
    temperature: Annotated[float, Range(0, 100)] = 0.0
    top_p: PositiveShare = 1.0
    top_k: Annotated[int, Range(0, 10_000_000)] = 0
    pass_threshold: RewardValue = 1.0
    beside_training: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, "model.validation")
        try:
            self.sampling(max_new_tokens=1)
        except ConfigError as error:
            raise ConfigError(f"model.validation: {error}") from None
        if self.num_samples > 1 and self.temperature == 0:
            raise ConfigError(
                f"model.validation.num_samples is {self.num_samples} and model.validation.temperature 0: greedy "
                "completions of a prompt are all the same. Set temperature above 0, or num_samples to 1."
            )

    def is_due(self, step: int) -> bool:
        """Return whether to validate after ``step`` steps."""
        if step == 0:
            return self.at_start
        return self.every_n_steps is not None and step % self.every_n_steps == 0

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """Return how validation completions are drawn."""
        return SamplingParams(max_new_tokens, self.temperature, self.top_p, self.top_k)
