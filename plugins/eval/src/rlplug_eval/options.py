"""Options of an evaluation, which its folder keeps."""

from __future__ import annotations

from dataclasses import dataclass

from rlplug.errors import ConfigError
from rlplug.training.validation.config import ValidationConfig
from rlplug.types import SamplingParams
from rlplug_eval.statistics import largest_ks


@dataclass(frozen=True)
class EvalOptions:
    """How each prompt is sampled and judged, the same for all policies."""

    num_samples: int
    ks: tuple[int, ...]
    """The k of each pass@k, increasing."""
    pass_threshold: float
    """A sample passes when its reward is at least this."""
    sampling: SamplingParams
    seed: int
    batch_size: int
    """Completions that are generated together, then scored and written."""

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.batch_size < 1:
            raise ConfigError(f"-n is {self.num_samples} and --batch-size {self.batch_size}: give at least 1 for each.")
        if self.num_samples > 1 and self.sampling.is_greedy:
            raise ConfigError(
                f"-n is {self.num_samples} and --temperature 0: greedy completions of a prompt are all the same. Set "
                "--temperature above 0, or -n to 1."
            )
        if wrong := [k for k in self.ks if not 1 <= k <= self.num_samples]:
            raise ConfigError(f"-k has {wrong[0]}: pass@k needs k from 1 to -n, which is {self.num_samples}.")

    @property
    def prompts_per_batch(self) -> int:
        return max(1, self.batch_size // self.num_samples)

    def sentence(self) -> str:
        """Return how it was sampled, for tables."""
        s = self.sampling
        cut = "".join(
            f", {name} {value:g}" for name, value, off in (("top-p", s.top_p, 1), ("top-k", s.top_k, 0)) if value != off
        )
        how = "greedy" if s.is_greedy else f"temperature {s.temperature:g}{cut}"
        number = f"{self.num_samples} sample{'s' * (self.num_samples > 1)} a prompt"
        judged = f"a sample passes with a reward of at least {self.pass_threshold:g}"
        return f"{number}, {how}, at most {s.max_new_tokens} tokens; {judged}"


def make_options(
    validation: ValidationConfig,
    training: SamplingParams,
    seed: int,
    num_samples: int | None = None,
    ks: tuple[int, ...] = (),
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    max_new_tokens: int | None = None,
    pass_threshold: float | None = None,
    batch_size: int = 256,
) -> EvalOptions:
    """Return the options, those that are not given by the run's configuration.

    Sampling is that of ``model.validation``, or that of ``model.sampling`` where validation is greedy and a prompt gets
    several samples.
    """
    number = validation.num_samples if num_samples is None else num_samples
    longest = training.max_new_tokens if max_new_tokens is None else max_new_tokens
    usual = validation.sampling(longest)
    if usual.is_greedy and number > 1:
        usual = training
    sampling = SamplingParams(
        longest,
        usual.temperature if temperature is None else temperature,
        usual.top_p if top_p is None else top_p,
        usual.top_k if top_k is None else top_k,
    )
    threshold = validation.pass_threshold if pass_threshold is None else pass_threshold
    return EvalOptions(number, ks or tuple(largest_ks(number)), threshold, sampling, seed, batch_size)
