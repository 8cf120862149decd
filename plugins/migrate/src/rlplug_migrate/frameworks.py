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
    found = list(_owners(name)) or list(_named_last(name))
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


def _named_last(name: str) -> Iterator[tuple[str, Framework, Key]]:
    """Yield the key whose last part an unknown name ends with, such as ``algorithm.adv_estimator``, if no key of ours
    ends so; of several the one with the fewest parts."""
    last = name.rpartition(".")[2]
    if any(last == key.to.rpartition(".")[2] for framework in FRAMEWORKS.values() for key in framework.keys):
        return
    for command, framework in FRAMEWORKS.items():
        named = sorted((key.name.count("."), key.name) for key in framework.keys if key.name.endswith(f".{last}"))
        if named and (len(named) == 1 or named[0][0] < named[1][0]):
            yield command, framework, framework.by_name[named[0][1]]


def _owners(name: str) -> Iterator[tuple[str, Framework, Key]]:
    for command, framework in FRAMEWORKS.items():
        key = framework.find(name)
        if key is not None and (not key.is_pattern or name.partition(".")[0] not in ("model", "data", "trainer")):
            yield command, framework, key
