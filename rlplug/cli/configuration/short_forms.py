"""Short forms of keys and values, as people write them first: ``policy: NAME``, ``train: FILE``, ``rewards: NAME``.

They are written out before jsonargparse reads a configuration, so ``--print_config`` and ``config.yaml`` have the keys
that :class:`rlplug.config.RunConfig` documents.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rlplug.errors import ConfigError
from rlplug.plugin_manager import plugins

SHORT_KEYS: Final[Mapping[str, str]] = {
    "policy": "model.policy",
    "train": "data.train",
    "val": "data.val",
    "rewards": "model.rewards",
    "reward": "model.rewards",
    "algorithm": "model.algorithm",
    "rollout": "model.rollout",
    "num_steps": "model.num_steps",
    "max_new_tokens": "model.sampling.max_new_tokens",
    "chat": "data.chat",
}
"""Keys that may stand at the top of a configuration, and as ``--KEY`` on the command line, and what they stand for."""
FLAGS: Final[Mapping[str, Sequence[str]]] = {"--verbose": ("--run.verbose", "true")}
"""Options of the command line without a value, and what they stand for."""

_DATA_FILE: Final = re.compile(r".*\.(jsonl|ndjson|parquet|json|csv|tsv|txt|arrow)", re.IGNORECASE)
_FUNCTION: Final = re.compile(r"[A-Za-z_][\w.]*\.[a-z_]\w*")
"""An import path whose last name is that of a function: a class's begins with a capital letter."""


def write_out(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a configuration file without short forms.

    Raises:
        ConfigError: A key is there twice, in its short and its long form.
    """
    written = {key: dict(value) if isinstance(value, dict) else value for key, value in content.items()}
    for short, key in SHORT_KEYS.items():
        if short not in content:
            continue
        *sections, name = key.split(".")
        block: Any = written
        for section in sections:
            found = block.get(section) or {}
            if not isinstance(found, dict):
                raise ConfigError(
                    f"the key {short!r} stands for {key}, and {section} is no block here: write {key} in it."
                )
            block[section] = dict(found)
            block = block[section]
        if name in block:
            raise ConfigError(f"the key {short!r} stands for {key}, which is there too: remove one.")
        block[name] = written.pop(short)
    for section, names in (("model", ("policy", "reference", "rewards")), ("data", ("train", "val"))):
        block = written.get(section)
        for name in names if isinstance(block, dict) else ():
            if name in block:
                block[name] = _value(f"{section}.{name}", block[name])
    return written


def write_out_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of ``fit`` without short forms; several ``--reward`` become one list.

    Raises:
        ConfigError: A short form has no value.
    """
    written: list[str] = []
    rewards: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if re.fullmatch(r"-\.?\d.*", argument) and written and written[-1].startswith("--"):
            written[-1] += f"={argument}"  # argparse takes -1e-3 for an option
            continue
        if argument in FLAGS:
            written += FLAGS[argument]
            continue
        name, equals, value = argument.removeprefix("--").partition("=")
        key = SHORT_KEYS.get(name, name.removesuffix("+"))
        if not argument.startswith("--") or (name not in SHORT_KEYS and key not in SHORT_KEYS.values()):
            written.append(f"--model.{argument[2:]}" if argument.startswith("--rollout.") else argument)
            continue
        if not equals and (value := next(rest, "--")).startswith("--"):
            raise ConfigError(f"--{name} needs a value, such as --{name} {_EXAMPLES.get(key, 'VALUE')}.")
        if key == "model.rewards" and name in SHORT_KEYS:
            rewards.append(value)
        elif key == "model.policy" and value[:1] != "{":
            written += ["--model.policy.path", value]
        else:
            new = _value(key, value)
            new = new[0] if key == "model.rewards" and isinstance(new, list) and name.endswith("+") else new
            written += [f"--{key}{'+' * name.endswith('+')}", new if isinstance(new, str) else json.dumps(new)]
    if rewards:
        texts = [json.loads(value) if value[:1] == "{" else value for value in rewards]
        written += ["--model.rewards", json.dumps(_value("model.rewards", texts))]
    return written


_EXAMPLES: Final[Mapping[str, str]] = {
    "model.policy": "Qwen/Qwen3-0.6B",
    "data.train": "train.jsonl",
    "data.val": "val.jsonl",
    "model.rewards": "MathVerify",
    "model.algorithm": "GRPO",
}


def _value(key: str, value: Any) -> Any:
    """Return the long form of a value: a model's name, a file or data set of prompts, a reward's name or function."""
    if key == "model.rewards":
        if isinstance(value, str) and value[:1] in ("[", "{"):
            return value
        return None if value is None else [_reward(each) for each in (value if isinstance(value, list) else [value])]
    if not isinstance(value, str) or not value:
        return value
    if key in ("model.policy", "model.reference"):
        return {"path": value}
    if key in ("data.train", "data.val") and value[:1] not in ("[", "{"):
        path = os.path.expanduser(value)
        if _DATA_FILE.fullmatch(value) or os.path.isfile(path):  # Path's raises where the name is too long
            return {"class_path": "FileSource", "init_args": {"path": value}}
        if "/" in value or os.path.isdir(path):
            return {"class_path": "HFDatasetSource", "init_args": {"path": value}}
    return value


def _reward(value: Any) -> Any:
    if isinstance(value, str) and _FUNCTION.fullmatch(value):
        return {"class_path": "FunctionReward", "init_args": {"function": value}}
    return {"class_path": value} if isinstance(value, str) else value


def with_defaults(arguments: list[str], contents: Iterable[Any]) -> list[str]:
    """Return the arguments with the algorithm and the engine of a run that names none.

    Such a run trains with GRPO, and generates on a GPU with the engine among those that are installed which prefers it
    most. A saved configuration has both keys, so that a run that goes on has the same.

    Args:
        arguments: Of the command, without short forms.
        contents: Of its configuration files, without short forms.
    """
    blocks = [content for content in contents if isinstance(content, dict)]
    registry = plugins().registry
    added: list[str] = []
    if not _is_given("model.algorithm", arguments, blocks) and "GRPO" in registry.names("algorithms"):
        added += ["--model.algorithm", "GRPO"]
    if not _is_given("model.rollout", arguments, blocks) and _trains_on_gpu(arguments, blocks):
        engines: Iterable[Any] = registry.each("rollouts")
        added += ["--model.rollout", max(engines, key=lambda engine: engine.preference("cuda")).__name__]
    return [*arguments[:1], *added, *arguments[1:]]


def _is_given(key: str, arguments: Sequence[str], blocks: Sequence[Mapping[str, Any]]) -> bool:
    section, _, name = key.partition(".")
    in_files = any(isinstance(block.get(section), Mapping) and name in block[section] for block in blocks)
    return in_files or any(re.match(rf"--{key}(=|\.|$)", argument) for argument in arguments)


def _trains_on_gpu(arguments: Sequence[str], blocks: Sequence[Mapping[str, Any]]) -> bool:
    import torch

    given = [block["trainer"].get("accelerator") for block in blocks if isinstance(block.get("trainer"), Mapping)]
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if option.startswith("--trainer.accelerator"):
            given.append(option.partition("=")[2] or value)
    given = [each for each in given if each is not None]
    return (given or ["auto"])[-1] in ("auto", "gpu", "cuda") and torch.cuda.is_available()
