"""Generates wrong configurations from right ones, and runs each up to loading a model.

python tests/integration/config_mutations.py [--bases "" grpo] [--share 0.1] [--seed 0] > report.txt
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from wrong_command_lines import ROOT, main

BASES: Final = ("", *sorted(path.stem for path in (ROOT / "configs" / "algo").glob("*.yaml")))
"""Algorithms whose configurations are mutated, and the quickstart alone."""

BLANK = "(blank)"  # as in `group_size:`
VALUES: Final[dict[str, Any]] = {
    "null": None,
    "-1": -1,
    "0": 0,
    "1e9": 10**9,
    "1e30": 1e30,
    "1e-30": 1e-30,
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "huge integer": 10**400,
    "empty text": "",
    "text": "many",
    "long text": "x" * 100_000,
    "bracket": "[/INST] [red]x[/red]",
    "surrogate": "\\ud800",
    "list": [1, 2],
    "empty list": [],
    "block": {"a": 1},
    "empty block": {},
    "true": True,
    "class": {"class_path": "no.such.Class"},
    "wrong class": {"class_path": "pathlib.Path"},
    "argument": {"class_path": "builtins.int", "init_args": {"no": 1}},
}
"""Values that replace a key's."""


@dataclass(frozen=True)
class Case:
    """A wrong configuration."""

    base: str
    key: str
    change: str
    make_text: Callable[[], bytes]

    @property
    def name(self) -> str:
        return f"{self.base or 'quickstart'}: {self.key or '(file)'}: {self.change}"

    def arguments(self) -> list[str]:
        """Write the file into the current folder, and return the command line."""
        return ["fit", "-c", _write(self)]

    def is_named(self, message: str) -> bool:
        """Return whether a message names the key, or the file where the file is wrong."""
        parts = self.key.split(".")
        last = parts[-1] + ("z" if self.change == "unknown key" else "")
        if "config.yaml: line " in message or "there is no key 'x.num_steps'" in message:
            return True
        named = ("config.yaml", "/dev/zero") if not self.key else (last, *parts[-2:-1] * (parts[-2:-1] != ["model"]))
        return any(name.lower() in message.lower() for name in named)


def resolved(base: str) -> dict[str, Any]:
    """Return the resolved configuration of the quickstart with an algorithm of ``configs/algo``."""
    from rlplug.cli.main import main

    files = ["-c", str(ROOT / "configs" / "quickstart.yaml")]
    files += ["-c", str(ROOT / "configs" / "algo" / f"{base}.yaml")] if base else []
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main(["fit", *files, "--print_config"])
    config: dict[str, Any] = yaml.safe_load(printed.getvalue())
    return config


def keys(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each key, blocks and what is in them."""
    for name, value in config.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from keys(value, (*path, name))


def cases(bases: tuple[str, ...] = BASES) -> Iterator[Case]:
    """Yield every wrong configuration; keys that several bases share are mutated once."""
    seen = set()
    for base in bases:
        config = resolved(base)
        for path in keys(config):
            algorithm = base if path[:2] == ("model", "algorithm") else ""
            if (path, algorithm) in seen:
                continue
            seen.add((path, algorithm))
            key = ".".join(path)
            for change, value in VALUES.items():
                if value != _get(config, path) or change in ("true", "0"):
                    yield Case(base, key, change, functools.partial(_changed, config, path, value))
            misspelled = (*path[:-1], path[-1] + "z")
            if _get(config, path) is not None:
                yield Case(base, key, "blank", functools.partial(_blank, config, path))
            yield Case(base, key, "unknown key", functools.partial(_changed, config, misspelled, 1))
            yield Case(base, key, "duplicate", functools.partial(_duplicate, config, path))
    yield from files(resolved(""))


def files(config: dict[str, Any]) -> Iterator[Case]:
    """Yield files that are no configuration at all."""
    good = dump(config)
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    texts = {
        "empty": b"",
        "binary": bytes(range(256)),
        "nul": b"model: \0",
        "latin-1": good + "\n# é\n".encode("latin-1"),
        "utf-16": good.decode().encode("utf-16"),
        "bom": b"\xef\xbb\xbf" + good,
        "yaml bomb": bomb.encode(),
        "bomb under a key": good + b"\n" + bomb.replace("\n", "\n").encode(),
        "recursive alias": b"model: &a\n  policy: *a\n",
        "deep list": b"model: " + b"[" * 5000 + b"]" * 5000,
        "deep block": "".join(f"{' ' * depth}a:\n" for depth in range(2000)).encode(),
        "text": b"quickstart",
        "list": b"- model\n- data\n",
        "number": b"17",
        "tab": b"model:\n\tpolicy: x\n",
        "unclosed": b"model: {policy: [",
        "two documents": good + b"\n---\n" + good,
        "python tag": b"model: !!python/object/apply:os.system ['true']\n",
        "long": good + b"#" * 20_000_000,
        "many keys": good + b"".join(b"k%d: 1\n" % i for i in range(200_000)),
        "number as a key": good + b"\n17: 1\n",
        "null as a key": good + b"\nnull: 1\n",
        "list as a key": good + b"\n[1, 2]: 1\n",
        "merge": b"x: &x {num_steps: 1}\n" + good.replace(b"model:\n", b"model:\n  <<: *x\n"),
        "(folder)": b"",
        "(missing)": b"",
        "(fifo)": b"",
        "(unreadable)": good,
        "(/dev/zero)": b"",
    }
    for change, text in texts.items():
        yield Case("", "", change, functools.partial(bytes, text))


def _get(config: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        config = config[name]
    return config


def _changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> bytes:
    return dump(_set(config, path, value))


def _blank(config: dict[str, Any], path: tuple[str, ...]) -> bytes:
    return dump(_set(config, path, BLANK)).replace(BLANK.encode(), b"")


def _set(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    _get(config, path[:-1])[path[-1]] = value
    return config


def dump(config: dict[str, Any]) -> bytes:
    return yaml.dump(config, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True).encode(
        "utf-8", "surrogatepass"
    )


def _duplicate(config: dict[str, Any], path: tuple[str, ...]) -> bytes:
    """Return the configuration with one key written twice."""
    twice = dump(_set(config, (*path[:-1], "TWICE"), _get(config, path))).decode()
    return re.sub(r"(?m)^(\s*)TWICE:", rf"\g<1>{path[-1]}:", twice).encode()


def _write(case: Case) -> str:
    if case.change == "(/dev/zero)":
        return "/dev/zero"
    path = Path("config.yaml")
    if case.change == "(folder)":
        path.mkdir()
    elif case.change == "(fifo)":
        os.mkfifo(path)
    elif case.change != "(missing)":
        path.write_bytes(case.make_text())
    if case.change == "(unreadable)":
        path.chmod(0)
        os.setresuid(65534, 65534, 65534) if os.getuid() == 0 else None
    return str(path)


if __name__ == "__main__":
    main(cases, BASES, "build_models")
