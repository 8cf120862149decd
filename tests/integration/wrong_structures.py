"""Generates configurations of a wrong structure: keys at another level, merges, classes, libraries' parts, variables.

``config_mutations`` has wrong values of right keys, and ``wrong_inputs`` right values that name something wrong.

python tests/integration/wrong_structures.py [--share 0.1] [--seed 0] [--match level] > report.txt
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml
from wrong_command_lines import ROOT, main
from wrong_inputs import CLASSES, WrongInput

LEVELS: Final = (
    *("model.policy.path", "model.policy.init", "model.policy.dtype", "model.batch.prompts_per_step"),
    *("model.batch.group_size", "model.sampling.max_new_tokens", "model.sampling.temperature", "model.num_steps"),
    *("model.limits.max_grad_norm", "model.validation.every_n_steps", "model.validation.at_start", "data.train"),
    *("data.val", "data.shuffle", "run.dir", "run.report", "checkpoint.every_n_steps", "trainer.accelerator"),
    *("trainer.devices", "trainer.precision", "model.algorithm", "model.rewards", "model.optimizer"),
)
"""Keys that are written in other blocks."""
BLOCKS: Final = ("", "model", "data", "trainer", "run", "checkpoint", "model.policy", "model.batch", "model.sampling")
TABLES: Final[dict[str, dict[str, Any]]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
"""Wrong values, texts and words, by kind."""
MODULES: Final[dict[str, bytes]] = {
    "own": b"class Any:\n    def __init__(self, *args, **kwargs):\n        pass\n\nLAMBDA = lambda: 1\n"
    b"INSTANCE = Any()\nNONE = None\n\n"
    b"class Raises:\n    attribute = property(lambda self: 1)\n    def __init__(self):\n"
    b"        raise KeyError('own')\n\nclass _M(type):\n    def __subclasscheck__(cls, other):\n"
    b"        raise OSError('meta')\n    def __instancecheck__(cls, other):\n        raise OSError('meta')\n\n"
    b"class Meta(metaclass=_M):\n    def __init__(self):\n        pass\n",
    "own_raises": b"raise KeyError('own')\n",
    "own_syntax": b"def f(:\n",
    "own_import": b"import no_such_library\n",
    "own_latin": b"NAME = '\xe9'\n",
    "own_nul": b"\0\0\0",
    "own_circle": b"from own_circle import Class\n",
}
VARIABLES: Final = {
    "ATTACK_LIST": "[1, 2]",
    "ATTACK_BLOCK": "{group_size: 4}",
    "ATTACK_EMPTY": "",
    "ATTACK_LONG": "x" * 100_000,
    "ATTACK_NAN": "nan",
    "ATTACK_NUMBER": "007",
}
LONG: Final = {
    "long name of a file": ["-c", "x" * 5000],
    "long name of a folder": ["--run.dir", "x" * 300],
    "seed that is large": ["--seed_everything", str(1 << 70)],
    "surrogate": ["--run.dir", "a\udcffb"],
}
"""Words that YAML would not hold well."""


def cases() -> Iterator[WrongInput]:
    """Yield every wrong structure."""
    for key in LEVELS:
        for block in BLOCKS:
            name = key.rpartition(".")[2]
            if (wrong := f"{block}.{name}".lstrip(".")) != key and not (block == "model" and key in ("data.train",)):
                yield WrongInput("level", f"{key} as {wrong}", name, partial(_file, _text({wrong: _value(key)})))
    for key, values in TABLES["nested"].items():
        for value in values:
            yield WrongInput(
                "nested",
                f"{key}: {value}",
                f"{key.split('.')[1]}|wrong.yaml|ToolEnvironment.functions",
                partial(_file, _block(key, value)),
            )
    for option, values in TABLES["trainer"].items():
        for value in values:
            text = _block(f"trainer.{option}", value)
            yield WrongInput("trainer", f"{option}: {value}", option, partial(_file, text))
    for key, classes in (("callbacks", TABLES["callbacks"]), ("logger", TABLES["loggers"])):
        for name, arguments in classes.items():
            for given in arguments:
                path = f"lightning.pytorch.{'loggers' if key == 'logger' else key}.{name}"
                text = _block(f"trainer.{key}", f"[{{class_path: {path}, init_args: {given}}}]")
                yield WrongInput(key, f"{name} {given}", f"trainer.{key}|{name}", partial(_file, text))
    for key in CLASSES:
        for fault, path in (TABLES["classes"] | {"a deep path": ".".join("abcdefgh" * 40)}).items():
            yield WrongInput(
                "class", f"{key} is {fault}", f"{key}|{path}|own|no import path", partial(_class, key, path)
            )
    for fault, text in TABLES["texts"].items():
        yield WrongInput("text", fault, "wrong.yaml|model.|data.|run.|seed|'", partial(_file, text))
    for fault, words in (TABLES["lines"] | LONG).items():
        named = next((word.lstrip("-+~").split("=")[0] for word in words if len(word) > 1), "option")
        parts = (named, named.partition("[")[0], named.rpartition(".")[0] or named, words[-1] or "config")
        named = "|".join([*parts, "config", "there is no key", "argument"])
        yield WrongInput("line", fault, named, partial(_line, words))


def _value(key: str) -> Any:
    """Return the value of a key in the quickstart, or another one that it takes."""
    value: Any = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return 2 if value is None else value


def _text(values: dict[str, Any]) -> str:
    """Return YAML of dotted keys, as blocks."""
    ((key, value),) = values.items()
    return _block(key, json.dumps(value))


def _block(key: str, value: str) -> str:
    """Return YAML of a value, itself in YAML, at a key with dots."""
    names = key.split(".")
    return "".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(names))[:-1] + f" {value}\n"


def _file(text: str) -> list[str]:
    os.environ.update(VARIABLES)
    Path("wrong.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    return ["-c", "wrong.yaml"]


def _class(key: str, path: str) -> list[str]:
    for name, text in MODULES.items():
        Path(f"{name}.py").write_bytes(text)
    value: Any = {"class_path": path}
    return _file(_block(key, json.dumps([value] if isinstance(CLASSES[key], list) else value)))


def _line(words: list[str]) -> list[str]:
    os.symlink("loop", "loop")
    return list(words)


if __name__ == "__main__":
    main(lambda _: cases(), (), "start_run")
