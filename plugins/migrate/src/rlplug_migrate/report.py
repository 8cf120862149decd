"""What was not converted and what has changed its meaning, as lists; and the table of all keys as Markdown."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Final

from rlplug_migrate.conversion import Draft
from rlplug_migrate.keys import Framework

TOPICS: Final[Mapping[str, str]] = {
    "algorithm": "Algorithm",
    "tuning": "Tuning",
    "engine": "Engine and sampling",
    "trainer": "Trainer",
    "data": "Data and rewards",
    "checkpoint": "Checkpoints",
    "logger": "Loggers",
}


def print_report(draft: Draft, doubts: Mapping[str, str]) -> None:
    """Print both lists to stderr; nothing where all was converted."""
    lacking = [f"{key}: {why}" for key, why in (*_grouped(draft), *doubts.items())]
    changed = [f"{key} -> {ours}: {what}" for key, ours, what in dict.fromkeys(draft.changed)]
    for title, lines in (("without a counterpart", lacking), ("with another meaning here", changed)):
        if lines:
            print(f"{draft.given.framework.name}'s keys, {title}:", file=sys.stderr)
        for line in lines:
            print(textwrap.fill(line, 118, initial_indent="  ", subsequent_indent="      "), file=sys.stderr)


def _grouped(draft: Draft) -> Iterator[tuple[str, str]]:
    """Yield keys and reasons; the keys of one pattern are one row."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, reason in draft.lacking.items():
        key = draft.given.framework.find(name)
        row = key.name if key is not None and key.is_pattern and key.note == reason else name
        names.setdefault((row, reason), []).append(name)
    for (row, reason), each in names.items():
        yield (each[0] if len(each) == 1 else f"{row} ({len(each)} keys)"), reason


def keys_table(framework: Framework) -> str:
    """Return the table of all keys, one part a topic, as Markdown."""
    lines = [f"# Keys of {framework.name} {framework.version}", ""]
    for topic, title in TOPICS.items():
        lines += [f"## {title}", "", f"{framework.name} | here | remark", "---|---|---", *_rows(framework, topic), ""]
    return "\n".join(lines).rstrip() + "\n"


def _rows(framework: Framework, topic: str) -> Iterator[str]:
    for key in framework.keys:
        if key.topic == topic:
            ours = ", ".join(f"`{each}`" for each in key.to.split(", ")) if key.to else "-"
            values = ", ".join(f"{theirs} is {each}" for theirs, each in key.values.items())
            default = "" if key.default is None else f"default {key.default}"
            remark = "; ".join(filter(None, (key.note, values, default)))
            yield f"`{key.name}` | {ours} | {remark.replace('|', '/')}"
