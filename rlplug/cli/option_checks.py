"""Checks of the resolved configuration before its classes are made: blocks, nulls, finite numbers, ranges, seeds.

jsonargparse takes null for any option and each number that its type holds; this module knows better.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import pydoc
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from jsonargparse import ArgumentParser, Namespace

from rlplug.errors import ConfigError, shorten


@dataclass(frozen=True)
class Range:
    """Range of a number, with its ends unless ``open``."""

    low: float
    high: float
    is_open: bool = False
    """Whether the number must be above ``low``."""

    def holds(self, value: float) -> bool:
        """Return whether ``value`` is in the range."""
        return (value > self.low if self.is_open else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        low = f"above {_text(self.low)} and" if self.is_open else f"from {_text(self.low)}"
        return f"{low} up to {_text(self.high)}"


DAY_S: Final = 86_400
SEED: Final = Range(0, 2**32 - 1)
COUNT: Final = Range(1, 1_000_000)
COUNT_OR_0: Final = Range(0, 1_000_000)
TOKENS: Final = Range(1, 100_000_000)
SECONDS: Final = Range(0.001, 30 * DAY_S)
SHARE: Final = Range(0, 1)
POSITIVE: Final = Range(1e-9, 1e6)

RANGES: Final[Mapping[str, Range]] = {
    "seed_everything": SEED,
    "trainer.devices": Range(-1, 1024),
    "trainer.num_nodes": COUNT,
    "trainer.strategy.replicate": COUNT,
    "trainer.strategy.sequence": COUNT,
    "trainer.strategy.tensor": COUNT,
    "trainer.strategy.timeout_s": SECONDS,
    "model.num_steps": Range(1, 10_000_000),
    "model.seed": SEED,
    "model.policy.seed": SEED,
    "model.reference.seed": SEED,
    "model.batch.prompts_per_step": COUNT,
    "model.batch.group_size": Range(1, 100_000),
    "model.batch.mini_batch_size": Range(1, 100_000_000),
    "model.batch.num_epochs": Range(1, 1000),
    "model.batch.max_tokens_per_gpu": TOKENS,
    "model.batch.max_tokens_per_gpu_forward": TOKENS,
    "model.batch.micro_batch_size_per_gpu": COUNT,
    "model.sampling.max_new_tokens": TOKENS,
    "model.sampling.temperature": Range(0, 100),
    "model.sampling.top_p": Range(0, 1, is_open=True),
    "model.sampling.top_k": Range(0, 10_000_000),
    "model.turns.max_turns": COUNT,
    "model.turns.max_tokens_per_turn": TOKENS,
    "model.turns.step_deadline_s": SECONDS,
    "model.turns.max_concurrency": Range(1, 10_000),
    "model.partial_rollout.over_provisioning": Range(1, 100, is_open=True),
    "model.partial_rollout.max_staleness": Range(0, 1000),
    "model.partial_rollout.max_tokens_per_step": TOKENS,
    "model.partial_rollout.max_seconds_per_step": SECONDS,
    "model.partial_rollout.trajectory_deadline_s": SECONDS,
    "model.partial_rollout.groups_in_flight": COUNT,
    "model.validation.every_n_steps": Range(1, 10_000_000),
    "model.validation.num_samples": Range(1, 100_000),
    "model.validation.temperature": Range(0, 100),
    "model.validation.top_p": Range(0, 1, is_open=True),
    "model.validation.top_k": Range(0, 10_000_000),
    "model.validation.pass_threshold": Range(-1e9, 1e9),
    "model.lora.rank": Range(1, 100_000),
    "model.lora.alpha": POSITIVE,
    "model.lora.seed": SEED,
    "model.weight_sync.keep_first_layers": COUNT_OR_0,
    "model.weight_sync.keep_last_layers": COUNT_OR_0,
    "model.weight_sync.bucket_mib": COUNT,
    "model.limits.max_grad_norm": POSITIVE,
    "model.limits.mismatch_gate": POSITIVE,
    "model.limits.reward_deadline_s": SECONDS,
    "model.limits.max_reward_error_share": SHARE,
    "model.limits.max_engine_restarts": COUNT_OR_0,
    "model.limits.stall_s": SECONDS,
    "model.limits.phase_deadline_s": SECONDS,
    "model.critic.value_coefficient": POSITIVE,
    "model.critic.max_grad_norm": POSITIVE,
    "model.critic.num_epochs": Range(1, 1000),
    "model.critic.warmup_steps": Range(0, 10_000_000),
    "model.critic.seed": SEED,
    "model.critic.trunk.seed": SEED,
    "data.max_prompt_tokens": TOKENS,
    "data.seed": SEED,
    "data.curriculum.low": SHARE,
    "data.curriculum.high": SHARE,
    "data.curriculum.outside": Range(0, 1, is_open=True),
    "data.curriculum.smoothing": Range(0, 1, is_open=True),
    "data.curriculum.pass_threshold": Range(-1e9, 1e9),
    "data.train.limit": Range(1, 10**12),
    "data.val.limit": Range(1, 10**12),
    "data.train.size": Range(1, 10_000_000),
    "data.val.size": Range(1, 10_000_000),
    "data.train.seed": SEED,
    "data.val.seed": SEED,
    "run.samples_per_step": COUNT_OR_0,
    "run.token_samples_per_step": COUNT_OR_0,
    "run.token_every_n_steps": Range(1, 10_000_000),
    "run.token_log_mib": Range(1, 10**9),
    "checkpoint.every_n_steps": Range(1, 10_000_000),
    "checkpoint.keep": COUNT,
    "profile.*": Range(0, 10_000_000),
    "model.algorithm.*": Range(-1e8, 1e8),
    "model.rewards.*": Range(-1e8, 1e8),
}
"""Range of each number of the core by its key, without ``init_args``; ``*`` stands for all that classes check."""

OPTIMIZER_RANGES: Final[Mapping[str, Range]] = {
    "lr": Range(0, 10),
    "eps": SHARE,
    "weight_decay": Range(0, 10),
    "betas": Range(0, 1 - 1e-9),
    "momentum": SHARE,
    "alpha": SHARE,
    "num_steps": Range(1, 100),
}
"""Range of each number of an optimizer by its name, whoever wrote the optimizer."""

LARGEST: Final = Range(-1e12, 1e12)
"""Range of all other numbers."""
MAX_TEXT: Final = 1_000_000
"""Longest text of an option, in characters; a name or path is far shorter."""
MAX_NAME: Final = 4096

_LONG_TEXTS: Final = ("prompt", "instruction", "template")
"""Ends of the keys of long texts, which may be empty."""
_FOREIGN: Final = ("trainer.logger", "trainer.callbacks")
"""Keys of other libraries' classes, to which an empty text may mean something."""

FORBIDDEN_FLAGS: Final[Mapping[str, str]] = {
    "maximize": "it would train away from the rewards",
    "differentiable": "the step of an optimizer is not differentiated here",
}
"""Options of optimizers that would undo the training, and why."""

SEED_KEYS: Final = (
    *("model.seed", "model.policy.seed", "model.lora.seed", "model.reference.seed", "model.critic.seed"),
    *("model.critic.trunk.seed", "data.seed"),
)
"""Seeds that follow ``seed_everything`` while they are 0."""


def check_options(parser: ArgumentParser, config: Namespace) -> None:
    """Check every option of the resolved ``config``.

    Raises:
        ConfigError: The message names the key, the value and the fix.
    """
    for key, hint in _top_level(parser):
        _require_blocks(config, key)
        value = config.get(key)
        is_empty = isinstance(value, Namespace | dict) and not _items(value) and not _hints_of_block(hint)
        # for an empty block jsonargparse puts in the type of what a function returns
        if is_empty or (isinstance(value, Namespace) and str(value.get("class_path")).startswith("typing.")):
            raise ConfigError(f"{key} is an empty block: give class_path and init_args, or remove it.")
        may_be_null = hint is None or _takes_null(hint) or parser.get_default(key) is None
        for name, found, is_allowed_null in _leaves(key, value, hint, may_be_null):
            _check_value(name, found, is_allowed_null)


def seed_all(config: Namespace) -> None:
    """Give the number of ``seed_everything`` to each seed of ``config`` that is 0, its default.

    Raises:
        ConfigError: ``seed_everything`` is false.
    """
    if config.seed_everything is False:
        raise ConfigError(
            "seed_everything is false, and every run has a seed: give a number, or true for a random one."
        )
    for key in SEED_KEYS:
        parent = config.get(key.rpartition(".")[0])
        if parent is not None and config.get(key) == 0:
            config[key] = config.seed_everything


def _top_level(parser: ArgumentParser) -> Iterator[tuple[str, Any]]:
    """Yield the key and type of each option of ``parser``, which argparse and jsonargparse keep in private members."""
    for action in parser._actions:
        if action.dest in ("help", "config") or action.dest.endswith(".help") or action.dest.startswith("print_"):
            continue
        yield action.dest, getattr(action, "_typehint", None) or action.type


def _require_blocks(config: Namespace, key: str) -> None:
    """Refuse a value where a block with ``key`` belongs."""
    parts = key.split(".")
    for end in range(1, len(parts)):
        block = ".".join(parts[:end])
        if not isinstance(config.get(block), Namespace | dict):
            raise ConfigError(
                f"{block} is {shorten(config.get(block))}: give a block of options, such as {parts[end]}, or remove it."
            )


def _leaves(key: str, value: Any, hint: Any, may_be_null: bool) -> Iterator[tuple[str, Any, bool]]:
    """Yield the key, the value and whether it may be null, of each option in ``value``."""
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, Mapping) and "class_path" in value:
        hints = _hints_of(value["class_path"])
        for name, inner in _items(value.get("init_args")):
            yield from _leaves(f"{key}.init_args.{name}", inner, *_type_of(hints, name))
    elif isinstance(value, Mapping):
        hints = _hints_of_block(hint)
        for name, inner in _items(value):
            yield from _leaves(f"{key}.{name}", inner, *_type_of(hints, name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _leaves(f"{key}[{index}]", inner, None, True)
    else:
        yield key, value, may_be_null


def _items(block: Any) -> list[tuple[str, Any]]:
    return list((vars(block) if isinstance(block, Namespace) else block or {}).items())


def _type_of(hints: Mapping[str, Any], name: str) -> tuple[Any, bool]:
    """Return the type of an option and whether it takes null; of an unknown type nothing is required."""
    hint = hints.get(name)
    return hint, hint is None or _takes_null(hint)


def _takes_null(hint: Any) -> bool:
    return hint is Any or type(None) in (hint, *typing.get_args(hint))


def _hints_of(class_path: Any) -> Mapping[str, Any]:
    """Return the types of the options of a class or of a function that makes one, by name."""
    try:
        return _hints(pydoc.locate(class_path))
    except Exception:  # noqa: BLE001 - foreign annotations may name anything; jsonargparse reports a wrong path
        return {}


def _hints_of_block(hint: Any) -> Mapping[str, Any]:
    """Return the types of the fields of the dataclass that ``hint`` is, or has among its choices."""
    for choice in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(choice):
            return _hints(choice)
    return {}


def _hints(made: Any) -> Mapping[str, Any]:
    if dataclasses.is_dataclass(made):
        return typing.get_type_hints(made)
    target: Callable[..., Any] = made.__init__ if inspect.isclass(made) else made
    hints = typing.get_type_hints(target)
    defaults = inspect.signature(target).parameters
    # `limit: int = None` takes null, as its default is
    return {name: hint for name, hint in hints.items() if name in defaults and defaults[name].default is not None}


def _check_value(key: str, value: Any, may_be_null: bool) -> None:
    """Refuse a null that the option does not take, a text without end, and a number out of its range."""
    if value is None and not may_be_null:
        raise ConfigError(f"{key} is null: give a value, or remove the key for its default.")
    if value == "" and not key.endswith(_LONG_TEXTS) and not key.startswith(_FOREIGN):
        raise ConfigError(f"{key} is an empty text: give a value, or remove the key for its default.")
    if isinstance(value, str) and len(value) > (MAX_TEXT if key.endswith(_LONG_TEXTS) else MAX_NAME):
        raise ConfigError(f"{key} is a text of {len(value):,} characters, {shorten(value)}: give a shorter one.")
    name = _option(key)
    if value is True and _is_optimizer(key) and name in FORBIDDEN_FLAGS:
        raise ConfigError(f"{key} is true, and {FORBIDDEN_FLAGS[name]}: remove it.")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not (isinstance(value, int) or math.isfinite(value)):
        raise ConfigError(f"{key} is {value}: give a finite number.")
    allowed = _range_of(key)
    if not allowed.holds(value):
        raise ConfigError(f"{key} is {shorten(value)}: give a number {allowed}.")


def _range_of(key: str) -> Range:
    """Return the range of a number."""
    plain = re.sub(r"\[\d+\]", "", key.replace(".init_args", ""))
    if plain in RANGES:
        return RANGES[plain]
    if _is_optimizer(key) and (found := OPTIMIZER_RANGES.get(_option(key))) is not None:
        return found
    parts = plain.split(".")
    return RANGES.get(f"{parts[0]}.*") or RANGES.get(f"{'.'.join(parts[:2])}.*") or LARGEST


def _option(key: str) -> str:
    return re.sub(r"\[\d+\]", "", key).rpartition(".")[2]


def _is_optimizer(key: str) -> bool:
    return ".optimizer.init_args." in key


def _text(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) and abs(number) < 10**15 else f"{number:g}"
