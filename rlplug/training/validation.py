"""Scores on held-out prompts: mean reward and pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlplug.errors import ConfigError
from rlplug.training.samples.table import SampleTable
from rlplug.types import ENVIRONMENT, SamplingParams


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

    every_n_steps: int | None = None
    at_start: bool = False
    num_samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    pass_threshold: float = 1.0
    beside_training: bool = False

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ConfigError(f"model.validation.num_samples is {self.num_samples}: give at least 1.")
        try:
            self.sampling(max_new_tokens=1)
        except ConfigError as error:
            raise ConfigError(f"model.validation: {error}") from None
        if self.num_samples > 1 and self.temperature == 0:
            raise ConfigError(
                f"model.validation.num_samples is {self.num_samples} and model.validation.temperature 0: greedy "
                "completions of a prompt are all the same. Set temperature above 0, or num_samples to 1."
            )
        if self.every_n_steps is not None and self.every_n_steps < 1:
            raise ConfigError(f"model.validation.every_n_steps is {self.every_n_steps}: give at least 1, or null.")

    def is_due(self, step: int) -> bool:
        """Return whether to validate after ``step`` steps."""
        if step == 0:
            return self.at_start
        return self.every_n_steps is not None and step % self.every_n_steps == 0

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """Return how validation completions are drawn."""
        return SamplingParams(max_new_tokens, self.temperature, self.top_p, self.top_k)


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimate without bias the chance that one of ``k`` samples passes, ``1 - C(n - c, k) / C(n, k)``.

    Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, equation 1.
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def validation_by_source(
    table: SampleTable, reward_names: Sequence[str], pass_threshold: float, sources: Sequence[str]
) -> dict[str, float]:
    """Return :func:`validation_metrics` of all prompts, and of each source as ``validate/<source>/...``."""
    metrics = validation_metrics(table, reward_names, pass_threshold)
    for index, name in enumerate(sources):
        found = validation_metrics(table[table["source"] == index], reward_names, pass_threshold)
        metrics |= {f"validate/{name}/{key.removeprefix('validate/')}": value for key, value in found.items()}
    return metrics


def validation_metrics(table: SampleTable, reward_names: Sequence[str], pass_threshold: float) -> dict[str, float]:
    """Return mean reward over the samples that have one, and pass@k over prompts; a failed reward is no pass.

    Args:
        table: The samples of all ranks; not empty.
        reward_names: Names of the rewards.
        pass_threshold: Smallest reward of a sample that passes.

    Returns:
        ``validate/reward_mean``, ``validate/error_share``, ``validate/length_mean`` in tokens, with an environment
        ``validate/turns_mean``, and ``validate/pass@k`` for k = 1, 2, 4, ... up to the samples of a prompt.
    """
    scored = table["reward"][~np.isnan(table["reward"])].tolist()
    metrics = {
        "validate/reward_mean": sum(scored) / len(scored) if scored else math.nan,
        "validate/error_share": 1 - len(scored) / len(table),
        "validate/length_mean": int(table["num_tokens"].sum()) / len(table),
    }
    if ENVIRONMENT in reward_names:
        metrics["validate/turns_mean"] = int(table["num_turns"].sum()) / len(table)
    sizes = np.unique(table["group"], return_counts=True)[1].tolist()
    starts = np.cumsum([0, *sizes[:-1]])
    passed = np.add.reduceat(table["reward"] >= pass_threshold, starts, dtype=np.int64).tolist()
    k = 1
    while k <= sizes[0]:
        chances = [pass_at_k(size, num, k) for size, num in zip(sizes, passed, strict=True)]
        metrics[f"validate/pass@{k}"] = sum(chances) / len(chances)
        k *= 2
    return metrics
