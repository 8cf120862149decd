"""Generates what people write by habit, from other frameworks, and what editors, shells and torn copies do.

python tests/integration/wrong_habits.py [--share 0.1] [--seed 0] [--match flags] > report.txt
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml
from wrong_command_lines import ROOT, main
from wrong_inputs import WrongInput

TABLES: Final[dict[str, dict[str, Any]]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
"""Texts and words, by kind, each with what a message must hold."""
ROWS: Final = '{"prompt": "1 2 3", "answer": "1"}\n' * 64
LAUGHS: Final = "\n".join(
    ["a: &a [x, x, x, x, x, x, x, x, x]"]
    + [
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]"
        for before, name in zip("abcdefghi", "bcdefghij", strict=True)
    ]
    + ["model: {rewards: *j}", ""]
)
"""Aliases that stand for 9 to the tenth texts."""
LONG: Final = {
    "billion laughs": LAUGHS,
    "deeply nested": f"model: {{rewards: {'[' * 3000}{']' * 3000}}}\n",
    "torn recipe": (ROOT / "configs" / "quickstart.yaml").read_text().partition("path: examples/quickstart/train")[0],
}
"""Configurations that YAML would not hold well."""


def cases() -> Iterator[WrongInput]:
    """Yield every wrong input."""
    for fault, each in TABLES["files"].items():
        content = each["text"].encode(each.get("encoding", "utf-8"))
        name = each.get("file", "w.yaml")
        yield WrongInput("habit file", fault, each["named"], partial(_file, name, content, ["-c", name]))
    for fault, text in LONG.items():
        named = "data.train" if fault == "torn recipe" else "w.yaml"
        yield WrongInput("habit file", fault, named, partial(_file, "w.yaml", text.encode(), ["-c", "w.yaml"]))
    for fault, each in TABLES["flags"].items():
        yield WrongInput("habit flag", fault, each["named"], partial(list, each["arguments"]))
    for fault, each in TABLES["variables"].items():
        make = partial(_variables, each["variables"], each.get("arguments", []))
        yield WrongInput("habit variable", fault, each["named"], make)
    for fault, each in TABLES["rows"].items():
        text = each.get("text") or each.get("first", "") + (each.get("each", "") * 64 or ROWS) + each.get("last", "")
        name = each.get("file", "p.jsonl")
        make = partial(_file, name, text.encode(each.get("encoding", "utf-8")), ["--train", name])
        yield WrongInput("habit rows", fault, each["named"], make)
    packed = partial(_file, "p.jsonl", gzip.compress(ROWS.encode()), ["--train", "p.jsonl"])
    yield WrongInput("habit rows", "gzip named jsonl", "p.jsonl", packed)


def _file(name: str, content: bytes, arguments: list[str]) -> list[str]:
    Path(name).write_bytes(content)
    return list(arguments)


def _variables(variables: Mapping[str, str], arguments: list[str]) -> list[str]:
    os.environ |= variables
    return list(arguments)


if __name__ == "__main__":
    main(lambda _: cases(), (), "start_run")
