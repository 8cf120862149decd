"""Options of an evaluation, which its folder keeps."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Final

import yaml

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
        sampling = self.sampling
        usual = vars(SamplingParams(sampling.max_new_tokens, sampling.temperature))
        cuts = {dashed(name): value for name, value in vars(sampling).items() if value != usual[name]}
        hidden = cuts.keys() - {"stop"} if sampling.is_greedy else {"extra"}
        shown = {name: value for name, value in cuts.items() if name not in hidden}
        how = "greedy" if sampling.is_greedy else f"temperature {sampling.temperature:g}"
        how += "".join(f", {name} {value}" for name, value in (shown | sampling.extra).items())
        number = f"{self.num_samples} sample{'s' * (self.num_samples > 1)} a prompt"
        judged = f"a sample passes with a reward of at least {self.pass_threshold:g}"
        return f"{number}, {how}, at most {sampling.max_new_tokens} tokens; {judged}"


SAMPLING_FIELDS: Final = tuple(each.name for each in fields(SamplingParams) if each.name != "stop")
"""Fields of the sampling that a command may change; the engine has the run's stop strings from its start."""


def add_sampling_options(parser: argparse.ArgumentParser, default: str) -> None:
    """Add an option for each of ``SAMPLING_FIELDS``, such as ``--top-p``.

    Args:
        parser: It gets the options, whose default is ``None``.
        default: Where else their values come from, for the help.
    """
    for name in SAMPLING_FIELDS:
        about = "options that only the engine knows, such as '{min_p: 0.1}'; " if name == "extra" else ""
        parser.add_argument(f"--{dashed(name)}", type=reader_of(name), help=f"{about}default: {default}")


def given_sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of :class:`SamplingParams` that a command line has given, by name."""
    given = {name: getattr(options, name) for name in SAMPLING_FIELDS}
    return {name: value for name, value in given.items() if value is not None}


def dashed(name: str) -> str:
    """Return the name of a field as a command line has it."""
    return name.replace("_", "-")


def reader_of(name: str) -> Callable[[str], Any]:
    """Return what reads the value of a field of :class:`SamplingParams` from text, or raises ``ValueError``."""
    kind = type(getattr(SamplingParams(), name))
    return block if kind is dict else kind


def block(text: str) -> dict[str, Any]:
    """Read a YAML block such as ``{min_p: 0.1}``."""
    with suppress(yaml.YAMLError):
        if isinstance(value := yaml.safe_load(text), dict):
            return value
    raise ValueError(text)


def make_options(
    validation: ValidationConfig,
    training: SamplingParams,
    seed: int,
    num_samples: int | None = None,
    ks: tuple[int, ...] = (),
    sampling: Mapping[str, Any] = MappingProxyType({}),
    pass_threshold: float | None = None,
    batch_size: int = 256,
) -> EvalOptions:
    """Return the options, those that are not given by the run's configuration.

    Sampling is that of ``model.validation``, or that of ``model.sampling`` where validation is greedy and a prompt gets
    several samples; ``sampling`` has the fields that are given.
    """
    number = validation.num_samples if num_samples is None else num_samples
    usual = validation.sampling_of(training)
    if usual.is_greedy and number > 1:
        usual = replace(training, max_new_tokens=usual.max_new_tokens)
    threshold = validation.pass_threshold if pass_threshold is None else pass_threshold
    return EvalOptions(number, ks or tuple(largest_ks(number)), threshold, replace(usual, **sampling), seed, batch_size)
