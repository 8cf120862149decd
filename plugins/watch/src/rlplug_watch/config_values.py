"""Values of a run's ``config.yaml`` by keys with dots, read as a stranger's: bounded, without aliases or secrets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from rlplug_watch.own_files import own_text
from rlplug_watch.secrets import mask_secrets, mask_yaml

MAX_KEYS: Final = 5000
"""Largest number of keys that are read of a configuration."""
MAX_CONFIG_DEPTH: Final = 30
MAX_CONFIG_BYTES: Final = 1 << 20
MAX_VALUE: Final = 300
"""Largest number of characters of a value that is compared."""

LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def flat_config(path: Path | None) -> Mapping[str, str]:
    """Return the values of a configuration as text, without its secrets, by keys with dots; none of a broken one."""
    try:
        text = "" if path is None else own_text(path, MAX_CONFIG_BYTES)
        tree = yaml.load(text, LOADER) if is_plain(text) else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    leaves = _leaves(tree, "", MAX_CONFIG_DEPTH) if isinstance(tree, dict) else ()
    return dict(pair for pair, _ in zip(leaves, range(MAX_KEYS), strict=False))


def masked_config(text: str) -> str:
    """Return a configuration's YAML without its secrets; nothing of a broken one, or one that has no end."""
    try:
        return mask_yaml(text) if len(text) <= MAX_CONFIG_BYTES and is_plain(text) else ""
    except yaml.YAMLError:  # which keys have secrets is not known then
        return ""


def is_plain(text: str) -> bool:
    """Return whether YAML is nested as a configuration is, without aliases: readers recurse until the process dies."""
    depth = 0
    for event in yaml.parse(text, Loader=LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_CONFIG_DEPTH or isinstance(event, yaml.AliasEvent):
            return False
    return True


def _leaves(value: Any, key: str, depth: int) -> Iterator[tuple[str, str]]:
    if not depth:
        yield key, "…"
    elif isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name), depth - 1)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{key}[{index}]", depth - 1)
    else:
        name = key.rpartition(".")[2]
        yield key, _text(mask_secrets({name: value})[name])


def _text(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"
