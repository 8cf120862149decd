"""A class that replaces another has what was written for it, and no default of the other: every pair, generated."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks
import lightning.pytorch.loggers
import lightning.pytorch.strategies
import pytest
import torch
from jsonargparse import Namespace

from rlplug.cli.configuration.trainer_options import REFUSED_CALLBACKS
from rlplug.cli.lightning_cli import ConfiguredCLI, read_command
from rlplug.data.sources import PromptSource
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.plugin_manager import plugins

ROOT = Path(__file__).parents[3]
BASE = ("--policy", "tests/model", "--train", "examples/quickstart/train.jsonl", "--trainer.accelerator", "cpu")
"""A run that says nothing of its classes: what it writes, such as a weight decay, is for each that knows it."""
LISTS = ("model.rewards", "model.optimizations", "trainer.callbacks")
WRITTEN: dict[str, Any] = {
    "path": "tests/model",
    "function": "tests.integration.parts.raises",
    "functions": [],
    "monitor": "reward/mean",
    "environment": "x",
    "endpoint": {"url": "http://127.0.0.1:1/v1", "model": "x"},
    "template": "{completion}",
    "pattern": "x",
    "reward": {"class_path": "MathVerify"},
    "save_dir": "logs",
    "milestones": [1],
    "step_size": 1,
    "max_lr": 1e-3,
    "base_lr": 1e-4,
    "gamma": 0.5,
    "T_max": 2,
    "T_0": 2,
}
"""Values of arguments without a default, which a replacement keeps where it knows them."""
MADE_FROM_OBJECTS = ("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau")
"""Schedulers whose required arguments no YAML holds, or which a run refuses."""
WAYS = ("file", "option", "class_path")


class Parsed(ConfiguredCLI):
    """A configuration that is read, of which nothing is made."""

    def instantiate_classes(self) -> None:
        pass


def exchangeable() -> dict[str, list[type]]:
    """Return the classes that each key takes."""
    registry = plugins().registry
    registry.import_all()
    kinds = ("algorithm", "rollout", "trainer", "environment", "rewards", "optimizations")
    found = {f"model.{key}": list(registry.classes(key.removesuffix("s") + "s").values()) for key in kinds}
    found["model.optimizer"] = _subclasses(torch.optim.Optimizer, "torch.optim", "rlplug")
    schedulers = _subclasses(torch.optim.lr_scheduler.LRScheduler, "torch.optim.lr_scheduler")
    found["model.lr_scheduler"] = [each for each in schedulers if each.__name__ not in MADE_FROM_OBJECTS]
    found["data.train"] = _subclasses(PromptSource, "rlplug")
    found["trainer.strategy"] = [RLFSDP2Strategy, *_named(lightning.pytorch.strategies, "Strategy")]
    loggers = _named(lightning.pytorch.loggers, "Logger")
    found["trainer.logger"] = [each for each in loggers if issubclass(each, lightning.pytorch.loggers.Logger)]
    callbacks = _named(lightning.pytorch.callbacks, "")
    found["trainer.callbacks"] = [each for each in callbacks if each.__name__ not in REFUSED_CALLBACKS]
    return found


def _named(module: Any, ending: str) -> list[type]:
    return [getattr(module, name) for name in module.__all__ if name.endswith(ending) and name != ending]


def _subclasses(base: type, *packages: str) -> list[type]:
    """Return the public classes of some packages that derive from ``base``, at any depth."""
    inner = [each for child in base.__subclasses__() for each in (child, *_subclasses(child, *packages))]
    kept = [each for each in inner if each.__module__.startswith(packages) and not each.__name__.startswith("_")]
    return [each for each in dict.fromkeys(kept) if not inspect.isabstract(each)]


def defaults_of(made: type) -> dict[str, Any]:
    """Return the arguments of a class with their defaults; one without a default has ``inspect.Parameter.empty``."""
    parameters = inspect.signature(made).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is not each.VAR_KEYWORD}


def pairs_of(classes: Sequence[type]) -> Iterator[tuple[type, type]]:
    """Yield two classes of which the first has an argument of the second with another default: all that could leak."""
    for first, second in itertools.permutations(classes, 2):
        old, new = defaults_of(first), defaults_of(second)
        if any(name in old and old[name] is not default and old[name] != default for name, default in new.items()):
            yield first, second


def value_of(key: str, made: type) -> Any:
    """Return what YAML has for a class: its path, and what it needs to be given."""
    needed = [name for name, default in defaults_of(made).items() if default is inspect.Parameter.empty]
    given = {name: WRITTEN[name] for name in needed if name in WRITTEN}
    block: dict[str, Any] = {"class_path": f"{made.__module__}.{made.__name__}"}
    block |= {"init_args": given} if given else {}
    return [block] if key in LISTS else block


def write(path: Path, chosen: dict[str, type]) -> list[str]:
    """Write a configuration file with a class for each key, and return its option."""
    config: dict[str, Any] = {}
    for key, made in chosen.items():
        section, name = key.split(".")
        config.setdefault(section, {})[name] = value_of(key, made)
    path.write_text(json.dumps(config))
    return ["-c", str(path)]


def init_args(arguments: Sequence[str], keys: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the resolved arguments of each key's class."""
    config = read_command(Parsed, ["fit", *BASE, *arguments]).config.fit
    found = {key: config[key][0] if key in LISTS else config[key] for key in keys}
    return {key: vars(block.get("init_args") or Namespace()) for key, block in found.items()}


def leaked(chosen: dict[str, tuple[type, type]], way: str, folder: Path) -> list[str]:
    """Return what each key's second class has of its first one's defaults, where it replaces that one."""
    first = write(folder / "first.yaml", {key: pair[0] for key, pair in chosen.items()})
    seconds = {key: pair[1] for key, pair in chosen.items()}
    second = write(folder / "second.yaml", seconds)
    alone = init_args(second, chosen)
    if way != "file":
        ending = ".class_path" if way == "class_path" else ""
        for key, made in seconds.items():
            value = value_of(key, made)
            if key in LISTS or "init_args" in value:
                second += [f"--{key}", json.dumps(value)]
            else:
                second += [f"--{key}{ending}", value["class_path"]]
        second = second[2:]
    after = init_args([*first, *second], chosen)
    return [
        f"{key}: {pair[0].__name__} -> {pair[1].__name__} by {way}: {name} is {after[key].get(name)}, not {value}"
        for key, pair in chosen.items()
        for name, value in alone[key].items()
        if after[key].get(name) != value and name not in WRITTEN
    ]


def rounds() -> list[tuple[dict[str, tuple[type, type]], str]]:
    """Return every pair of classes, one of each key at a time, and the ways in which the second may be named."""
    pairs = {key: found for key, classes in exchangeable().items() if (found := list(pairs_of(classes)))}
    most = max(map(len, pairs.values()))
    return [
        ({key: found[index] for key, found in pairs.items() if index < len(found)}, WAYS[index % len(WAYS)])
        for index in range(most)
    ]


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr("sys.argv", ["rlplug"])


def test_a_class_of_each_key_has_no_default_of_another(tmp_path: Path) -> None:
    """Alone catches a new key, or a new kind of class, whose defaults are carried over to the class in its place."""
    every = rounds()
    assert len(every[0][0]) > 7

    assert not [each for chosen, way in every[: len(WAYS)] for each in leaked(chosen, way, tmp_path)]


def test_a_default_that_a_file_wrote_is_kept(tmp_path: Path) -> None:
    """Alone catches a written value that is lost because it is the default of the class that goes."""
    adam = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1, "weight_decay": 0.01}}
    (tmp_path / "first.yaml").write_text(json.dumps({"model": {"optimizer": adam}}))
    arguments = ["-c", str(tmp_path / "first.yaml"), "--model.optimizer", "torch.optim.SGD"]
    found = init_args(arguments, ["model.optimizer"])["model.optimizer"]
    assert (found["lr"], found["weight_decay"]) == (0.1, 0.01)

    whole = adam["init_args"] | {
        name: each for name, each in defaults_of(torch.optim.AdamW).items() if name != "params"
    }
    (tmp_path / "first.yaml").write_text(
        json.dumps({"model": {"optimizer": adam | {"init_args": whole | {"lr": 0.1}}}})
    )
    assert init_args(arguments, ["model.optimizer"])["model.optimizer"]["weight_decay"] == 0


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_class_has_a_default_of_another(tmp_path: Path) -> None:
    """As above, every pair of classes that a file may exchange."""
    assert not [each for chosen, way in rounds() for each in leaked(chosen, way, tmp_path)]


@pytest.mark.parametrize("way", WAYS)
def test_adamw_behind_another_optimizer_has_the_rate_of_the_key(way: str, tmp_path: Path) -> None:
    """Alone catches that ``AdamW`` named again has torch's rate, 1e-3, and not the 1e-6 of ``model.optimizer``."""
    assert leaked({"model.optimizer": (torch.optim.Adafactor, torch.optim.AdamW)}, way, tmp_path) == []
