"""YAML of a draft, with a comment above each section and behind each value that is the other framework's default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml

from rlplug_migrate.conversion import Draft

SECTIONS: Final[Mapping[str, str]] = {
    "seed_everything": "",
    "trainer": "Devices, strategy and loggers",
    "model": "Policy, algorithm, sizes, engine and optimizer",
    "data": "Prompts",
    "run": "Folder of the run",
    "checkpoint": "Checkpoints",
    "profile": "Steps that are profiled",
}
"""Our sections in the order in which they are written, and the comment above each."""


def to_yaml(draft: Draft, source: str) -> str:
    """Return the configuration as YAML; ``source`` says what it was made of."""
    framework = draft.given.framework
    tree = _tree(draft.settings)
    lines = [f"# Made of {source} by rlplug import-config, with the keys of {framework.name} {framework.version}."]
    for section, comment in SECTIONS.items():
        if section in tree:
            lines += ["", f"# {comment}"] if comment else []
            lines += _lines({section: tree[section]}, "", 0, draft)
    return "\n".join(lines) + "\n"


def _tree(settings: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *blocks, name = key.split(".")
        block = tree
        for part in blocks:
            block = block.setdefault(part, {})
        if not (value == {} and name in block):
            block[name] = value
    return tree


def _lines(block: Mapping[str, Any], path: str, depth: int, draft: Draft) -> Iterator[str]:
    for name, value in block.items():
        key, indent = f"{path}{name}", "  " * depth
        if isinstance(value, dict) and value and key not in draft.settings:
            yield f"{indent}{name}:"
            yield from _lines(value, f"{key}.", depth + 1, draft)
            continue
        comment = f"  # {draft.from_defaults[key]}" if key in draft.from_defaults else ""
        text = yaml.safe_dump(value, sort_keys=False, default_flow_style=_is_flat(value) or None, width=10_000)
        first, *rest = text.removesuffix("...\n").rstrip("\n").split("\n")
        if rest or (isinstance(value, (dict, list)) and value and not _is_flat(value)):
            yield f"{indent}{name}:{comment}"
            yield from (f"{indent}  {line}" for line in (first, *rest))
        else:
            yield f"{indent}{name}: {first}{comment}"


def _is_flat(value: Any) -> bool:
    """Return whether a list or block fits a line: it has texts and numbers alone."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not any(isinstance(item, (dict, list)) for item in items)
