"""The frameworks whose configurations are read, and which of our keys is one of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rlplug.errors import shorten
from rlplug_migrate.four_bits import explain_four_bits
from rlplug_migrate.keys import Framework, Key
from rlplug_migrate.openrlhf import OPENRLHF
from rlplug_migrate.trl import TRL
from rlplug_migrate.verl import VERL

FRAMEWORKS: Final = {"verl": VERL, "trl": TRL, "openrlhf": OPENRLHF}


def explain_key(name: str) -> str | None:
    """Return what a key of another framework is here, as a sentence, or ``None`` where none has it."""
    if (why := explain_four_bits(name)) is not None:
        return why
    found = [(command, framework, key) for command, framework, key in _owners(name)]
    if found:
        command, framework, key = found[0]
        if key.to:
            more = f" ({key.note})" if key.note else ""
            return f"It is {framework.name}'s, and here {key.to}{more}. rlplug import-config {command} FILE writes all."
        return f"It is {framework.name}'s, without a counterpart: {key.note}."
    for command, framework in FRAMEWORKS.items():
        if any(key.name.startswith(f"{name}.") for key in framework.keys) and name not in ("model", "data", "trainer"):
            return (
                f"{shorten(name)} is a section of {framework.name}'s: rlplug import-config {command} FILE writes ours."
            )
    return None


def _owners(name: str) -> Iterator[tuple[str, Framework, Key]]:
    for command, framework in FRAMEWORKS.items():
        key = framework.find(name)
        if key is not None and (not key.is_pattern or name.partition(".")[0] not in ("model", "data", "trainer")):
            yield command, framework, key
