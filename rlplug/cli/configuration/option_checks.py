"""Checks of the resolved configuration before its classes are made: blocks, nulls, numbers, seeds.

jsonargparse takes null for any option, and each number that its type holds. The ranges of numbers are on their fields
(:mod:`rlplug.types.ranges`); they are checked here too, because here each has its whole key.
"""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from jsonargparse import Namespace
from lightning.pytorch import Trainer

from rlplug.config import RunConfig
from rlplug.data.datamodule import PromptDataModule
from rlplug.distributed.checkpoint import RLCheckpoint
from rlplug.errors import ConfigError, shorten
from rlplug.recording.profiler import StepProfiler
from rlplug.recording.run_folder import RunFolder
from rlplug.types.ranges import Range, Seed, hints_of, range_of

SECTIONS: Final[Mapping[str, Any]] = {
    "seed_everything": Seed | bool,
    "trainer": Trainer,
    "model": RunConfig,
    "data": PromptDataModule,
    "run": RunFolder,
    "checkpoint": RLCheckpoint,
    "profile": StepProfiler,
}
"""Class whose arguments a section of the configuration has, or the type of an option at the top."""

OTHER_RANGES: Final[Mapping[str, Range]] = {
    "trainer.devices": Range(-1, 1024),
    "trainer.num_nodes": Range(1, 1_000_000),
    "model.algorithm": Range(-1e8, 1e8),
    "model.rewards": Range(-1e8, 1e8),
}
"""Range of a number whose type has none, by its key, without ``init_args``, or by the first parts of it."""

OPTIMIZER_RANGES: Final[Mapping[str, Range]] = {
    "lr": Range(0, 10, is_open=True),
    "eps": Range(0, 1),
    "weight_decay": Range(0, 10),
    "betas": Range(0, 0.999999),
    "momentum": Range(0, 1),
    "alpha": Range(0, 1),
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


def check_options(config: Namespace) -> None:
    """Raise ``ConfigError`` for a null that an option does not take, a text without end, a number out of its range."""
    for key, value, hint in all_options(config):
        if value is None and not _takes_null(hint):
            raise ConfigError(f"{key} is null: give a value, or remove the key for its default.")
        is_long = key.endswith(_LONG_TEXTS)
        if value == "" and not is_long and not key.startswith(_FOREIGN):
            raise ConfigError(f"{key} is an empty text: give a value, or remove the key for its default.")
        if isinstance(value, str) and len(value) > (MAX_TEXT if is_long else MAX_NAME):
            raise ConfigError(f"{key} is a text of {len(value):,} characters, {shorten(value)}: give a shorter one.")
        if value is True and (why := FORBIDDEN_FLAGS.get(_option_of_optimizer(key))):
            raise ConfigError(f"{key} is true, and {why}: remove it.")
        range_at(key, hint).check(key, value)


def seed_all(config: Namespace) -> None:
    """Give the number of ``seed_everything`` to each :data:`Seed` of ``config`` that is 0, its default.

    Seeds among a class's ``init_args`` are its own.

    Raises:
        ConfigError: ``seed_everything`` is false.
    """
    if config.seed_everything is False:
        raise ConfigError(
            "seed_everything is false, and every run has a seed: give a number, or true for a random one."
        )
    for key, value, hint in list(all_options(config)):
        if value == 0 and range_of(hint) == range_of(Seed) and ".init_args." not in key:
            config[key] = config.seed_everything


def all_options(config: Namespace) -> Iterator[tuple[str, Any, Any]]:
    """Yield the key, the value and the type, ``None`` where it is not known, of each option that is no block.

    Raises:
        ConfigError: There is a value in place of a block, or an empty block in place of a class.
    """
    for section, value in _items(config):
        yield from _options(section, value, SECTIONS.get(section))


def _options(key: str, value: Any, hint: Any) -> Iterator[tuple[str, Any, Any]]:
    items, hints, of_values = _items(value), _hints_of_block(hint), _type_of_values(hint)
    if isinstance(value, Namespace | Mapping):
        class_path = str(value.get("class_path", ""))
        is_empty = not (items or hints or hint is None or of_values)
        # for an empty block jsonargparse puts in the type of what a function returns
        if is_empty or class_path.startswith("typing."):
            raise ConfigError(f"{key} is an empty block: give class_path and init_args, or remove it.")
        if class_path:
            key, items, hints = f"{key}.init_args", _items(value.get("init_args")), _hints_of(class_path)
        for name, inner in items:
            yield from _options(f"{key}.{name}", inner, hints.get(name, None if class_path else of_values))
    elif hints and not _takes_null(hint):
        such = next(iter(hints))
        raise ConfigError(f"{key} is {shorten(value)}: give a block of options, such as {such}, or remove it.")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _options(f"{key}[{index}]", inner, None)
    else:
        yield key, value, hint


def _items(block: Any) -> list[tuple[str, Any]]:
    block = vars(block) if isinstance(block, Namespace) else block
    return list(block.items()) if isinstance(block, Mapping) else []


def _choices(hint: Any) -> Sequence[Any]:
    """Return the types of a union, or the one type that it is."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _takes_null(hint: Any) -> bool:
    """Return whether a type takes null; of an unknown type nothing is required."""
    return hint in (None, Any) or type(None) in _choices(hint)


def _type_of_values(hint: Any) -> Any:
    """Return the type of the values of the mapping that ``hint`` is or has among its choices, or ``None``."""
    for choice in _choices(hint):
        kind = typing.get_origin(choice) or choice
        if kind is Any or (inspect.isclass(kind) and issubclass(kind, Mapping)):
            return (*typing.get_args(choice), Any, Any)[1]
    return None


def _hints_of(class_path: Any) -> Mapping[str, Any]:
    """Return the types of the options of a class or of a function that makes one, by name."""
    try:
        return hints_of(pydoc.locate(class_path))
    except Exception:  # noqa: BLE001 - foreign annotations may name anything; jsonargparse reports a wrong path
        return {}


def _hints_of_block(hint: Any) -> Mapping[str, Any]:
    """Return the types of the options of a section, or of the dataclass that ``hint`` is or has among its choices."""
    for choice in _choices(hint):
        if inspect.isclass(choice) and (dataclasses.is_dataclass(choice) or choice in SECTIONS.values()):
            return hints_of(choice)
    return {}


def range_at(key: str, hint: Any) -> Range:
    """Return the range of a number: that of its type, or else by its key."""
    if (found := range_of(hint) or OPTIMIZER_RANGES.get(_option_of_optimizer(key))) is not None:
        return found
    plain = key.replace(".init_args", "").replace("[", ".")
    return next((each for start, each in OTHER_RANGES.items() if f"{plain}.".startswith(f"{start}.")), LARGEST)


def _option_of_optimizer(key: str) -> str:
    """Return the name of an optimizer's option, without the index in a list; empty for other keys."""
    return re.sub(r"\[\d+\]", "", key.partition(".optimizer.init_args.")[2])
