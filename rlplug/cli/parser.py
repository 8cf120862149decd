"""Argument parser: jsonargparse with short errors that name the key and the nearest valid one."""

from __future__ import annotations

import argparse
import re
import reprlib
from typing import Any, ClassVar, Final, NoReturn, get_type_hints

from lightning.pytorch.cli import LightningArgumentParser

from rlplug.config import RunConfig
from rlplug.data.sources import PromptSource
from rlplug.errors import ConfigError, did_you_mean
from rlplug.plugin_manager import plugins
from rlplug.registry import KNOWN_DISTRIBUTIONS

KIND_OF_KEY: Final = {
    "model.algorithm": "algorithms",
    "model.trainer": "trainers",
    "model.rollout": "rollouts",
    "model.rewards": "rewards",
    "model.environment": "environments",
    "model.optimizations": "optimizations",
    "launch.launcher": "launchers",
}
"""Kind of the registered classes that a key of the configuration names."""

MAX_LENGTH: Final = 800
"""Longest message, in characters."""

_UNKNOWN_KEY: Final = re.compile(r"does not accept option '([^']+)'|unrecognized arguments: (?:--)?([^\s=]+)")
_UNKNOWN_OPTION: Final = re.compile(r"^Option '([^']+)' is not accepted")
_UNKNOWN_CLASS: Final = re.compile(r"Expected a dot import path string: ?(.*)")
_NO_SUBCLASS: Final = re.compile(r"Subclasses are disabled for (\w+), thus '([^']+)'")
_MISSING: Final = re.compile(r"arguments are required: (.+)")
_NOISE: Final = re.compile(
    r"\s*(?:Does not validate against|Subtypes: |Errors:|Given value|- Expected a path but|- Does not validate"
    r"|- a class path \(str\)|- a dict |Subclass types expect)"
)
_INSIDE: Final = re.compile(r"[A-Za-z_][\w.]*(?: is |: )|there is no (?:option|key) |the configuration lacks ")
"""Start of a message of the parser of a class's options, which this one passes on."""
_GOT: Final = re.compile(r"(Expected a .*?)\.? Got value: (.*)")
_EXPECTED: Final = re.compile(r"Expected a (?:<class '([^']+)'>|typing\.(.+)|(.+))|Not a valid subclass of (\S+)")
_PROBLEM: Final = re.compile(r"Problem with given class_path '([^']+)'")
_TYPE_WORDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "dict": "a block",
    "NoneType": "null",
}
_NUMBERS_OR_CLASSES: Final = ("lr",)
"""Options that are a number, or an object such as a tensor that no YAML holds."""


_FOUR_BITS: Final = re.compile(
    r"(?:.*\.)?(?:load_in_[48]bit|quantization|quantization_config|quantize|qlora|bnb_\w+|bitsandbytes\w*|nf4|use_4bit)(?:\..*)?$"
)
"""Keys by which other frameworks quantise the frozen weights of a LoRA run."""
_NO_FOUR_BITS: Final = (
    "there is no key {key}: frozen weights in 4 or 8 bits (QLoRA) are not built. FSDP2 makes plain parameters of "
    "bitsandbytes' and loses their scales (huggingface/accelerate#3983); torchao's would be sharded, but weight sync, "
    "checkpoints and memory plan read the frozen weights as they are. Use model.lora with model.policy.dtype: bfloat16 "
    "over more GPUs; see docs/lora.md."
)


TRAINER_HELP: Final = """
Lightning's Trainer:
  Among its options are --trainer.accelerator, --trainer.devices, --trainer.num_nodes, --trainer.strategy and
  --trainer.logger. All of them: rlplug {command} --help-all
"""


class RLArgumentParser(LightningArgumentParser):
    """Parser that raises :class:`ConfigError` where jsonargparse would print the usage and exit.

    jsonargparse makes parsers of the same class for the ``init_args`` of classes inside the configuration; the outer
    parser wraps their errors, key by key.
    """

    shows_trainer: ClassVar[bool] = False
    """Whether help shows the options of Lightning's Trainer too, after all others."""

    def format_help(self, formatter: Any = None) -> str:
        groups = self._action_groups
        trainer = [group for group in groups if any(_is_of_trainer(action) for action in group._group_actions)]
        if not trainer:
            return super().format_help(formatter)
        command = self.prog.split()[-1]
        usage, self.usage = self.usage, f"rlplug {command} [-c CONFIG] [--KEY VALUE] ..."
        self._action_groups = [group for group in groups if group not in trainer] + trainer * self.shows_trainer
        try:
            text = super().format_help(formatter)
        finally:
            self.usage, self._action_groups = usage, groups
        text = text.replace(" \b", "")  # jsonargparse has a terminal erase the blank before [=flags]
        return text if self.shows_trainer else text + TRAINER_HELP.format(command=command)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise ConfigError(self._explain(message)) from ex

    def _explain(self, message: str) -> str:
        key, body = _split_key(message)
        if found := _MISSING.search(message):
            lacking = " and ".join(re.sub(r"\b(?:fit|validate)\.", "", found[1]).split(", "))
            example = " configs/quickstart.yaml is a complete configuration." if "." in lacking else ""
            return f"the configuration lacks {lacking}: set it.{example}"
        if key is None and (found := _UNKNOWN_KEY.search(message)):
            name = next(filter(None, found.groups()))
            if _FOUR_BITS.match(name):
                return _NO_FOUR_BITS.format(key=shorten(name))
            return f"there is no key {shorten(name)}.{did_you_mean(name, self._keys())} All keys: rlplug fit --help"
        if key is None and (found := _UNKNOWN_OPTION.search(message)):
            if _FOUR_BITS.match(found[1]):
                return _NO_FOUR_BITS.format(key=repr(found[1]))
            options = [name for name in self._keys() if name not in ("config",) and not name.endswith("help")]
            return f"there is no option {found[1]!r}.{did_you_mean(found[1], options)} Options: {', '.join(options)}."
        if found := _NO_SUBCLASS.search(message):
            blocks = [f"model.{name}" for name, hint in get_type_hints(RunConfig).items() if found[1] in str(hint)]
            return f"{' or '.join(blocks) or found[1]} has the class_path {found[2]!r}: give its options alone."
        if key is None:
            return _cut(" ".join(message.split()))
        return _cut(_explain_value(key, body))

    def _keys(self) -> list[str]:
        """Return every key of the parser and of its subcommands."""
        keys: list[str] = []
        for action in self._actions:
            if action.dest == "subcommand":
                parsers: Any = action.choices
                keys += [key for parser in parsers.values() for key in parser._keys()]
            else:
                keys.append(action.dest)
        return keys


def shorten(value: object) -> str:
    """Return a value for a message: of a long one only its ends."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(value)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 100]} ... {text[-80:]}"


def _split_key(message: str) -> tuple[str | None, list[str]]:
    """Return the key that jsonargparse's message is about, and its other lines."""
    found = re.match(r'Parser key "([^"]+)":', message)
    if found is None:
        return None, []
    return found[1], [line for line in message[found.end() :].splitlines() if line.strip()]


def _explain_value(key: str, lines: list[str]) -> str:
    """Return what is wrong with the value of ``key``.

    jsonargparse tries each type of a union, and lists why each refused the value. The reason to tell is that of the
    type which the user meant: the one that accepted the value's form and found a fault inside, as a parser of its
    options (of this class) says.
    """
    given = next((line.split(":", 1)[1].strip() for line in lines if line.lstrip().startswith("Given value:")), None)
    reasons = [re.sub(r"^\s*- ", "", line).strip() for line in lines if not _NOISE.match(line)]
    inside = [reason for reason in reasons if _INSIDE.match(reason)]
    if inside:
        reason = inside[0]
        if reason.startswith(("there is no option ", "there is no key ")):
            return f"{key}: {reason}"
        if reason.startswith("the configuration lacks "):
            return f"{key}: it lacks {reason.removeprefix('the configuration lacks ')}"
        has_class = given is None or "class_path" in given.split(",")[0]
        return f"{key}.init_args.{reason}" if has_class else f"{key}.{reason}"
    for reason in reasons:
        if found := _PROBLEM.match(reason):
            name = found[1].rpartition(".")[2]
            return (
                f"{key}: {name} takes its options as a block under init_args. They are: rlplug fit --{key}.help {name}"
            )
    named = [found[1] for reason in reasons if (found := _UNKNOWN_CLASS.match(reason))]
    if named and (explained := _explain_class(key, named[0])):
        return f"{key}: {explained} Or give an import path, package.Class."
    for reason in reasons:
        if found := _GOT.match(reason):
            reasons, given = [found[1]], found[2]
    types = [_type_words(found) for reason in reasons if (found := _EXPECTED.match(reason))]
    if types and given is not None:
        return f"{key} is {given[:80]}: give {' or '.join(dict.fromkeys(types))}."
    value = "" if given is None else f" (it is {given[:80]})"
    return f"{key}: {' '.join(' '.join(reasons).split())}{value}"


def _type_words(found: re.Match[str]) -> str:
    """Return the words for a type that jsonargparse expected."""
    name, typing_name, other, subclass = found.groups()
    if subclass is not None:
        return f"a block with the class_path of a {subclass}, or its options"
    if typing_name is not None:
        return re.sub(r"^Literal\[(.*)\]", lambda literal: literal[1].replace(", ", " or "), typing_name)
    return _TYPE_WORDS.get(name, name) if name is not None else str(other)


def _is_of_trainer(action: argparse.Action) -> bool:
    return action.dest == "trainer" or action.dest.startswith("trainer.")


def _explain_class(key: str, name: str) -> str | None:
    """Return what is wrong with the name of a class, or ``None`` where no class is meant."""
    if kind := KIND_OF_KEY.get(key):
        for record in plugins().records:
            if record.state == "blocked" and record.distribution == KNOWN_DISTRIBUTIONS.get(name):
                return f"{name!r} comes with {record.distribution}, which is blocked: drop --block {record.name}."
        return plugins().registry.explain_unknown(kind, name)
    if key.rpartition(".")[2] in _NUMBERS_OR_CLASSES:
        return None
    known = (
        [source.__name__ for source in PromptSource.__subclasses__()]
        if key.startswith(("data.train", "data.val"))
        else []
    )
    return f"{shorten(name)} is not a known class.{did_you_mean(name, known)}"
