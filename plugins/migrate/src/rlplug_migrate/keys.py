"""Keys of another framework: what each becomes here, or why it becomes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from rlplug_migrate.conversion import Draft, Given

Topic: TypeAlias = Literal["algorithm", "tuning", "engine", "data", "trainer", "checkpoint", "logger"]
Rule: TypeAlias = "Callable[[Given, Draft], None]"
"""Writes what several keys decide together."""

OMIT: Final = object()
"""What ``Key.read`` returns where nothing has to be written: the value is our default, or asks for nothing."""


@dataclass(frozen=True)
class Key:
    """One key of the other framework, or several by a pattern.

    Args:
        name: The key, as the framework writes it; ``*`` in it stands for anything.
        topic: Part of the table in which it is listed.
        to: Our key, or keys with commas between them; empty where there is none.
        note: Without ``to``, the reason; with it, what it means that the other does not.
        read: Returns our value for theirs, where ``to`` follows from this key alone; else a rule writes it.
        default: Their default, where it is not what ours does.
        values: Our value by theirs, for the table.
    """

    name: str
    topic: Topic
    to: str = ""
    note: str = ""
    read: Callable[[Any], Any] | None = None
    default: Any = None
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_pattern(self) -> bool:
        return "*" in self.name


@dataclass(frozen=True)
class Framework:
    """A framework whose configurations are read.

    Args:
        name: Its name, as it is written.
        version: Version whose keys these are.
        keys: All of them; the first pattern that fits a name counts, and a name before any pattern.
        rules: What keys decide together, in order.
        program: Regular expression of what starts it in a shell script; its arguments follow.
        takes_options: Whether arguments are ``--key value``; else they are Hydra's ``key=value``.
        sections: First parts of keys, one of which every configuration has.
    """

    name: str
    version: str
    keys: Sequence[Key]
    rules: Sequence[Rule]
    program: str
    takes_options: bool
    sections: frozenset[str]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Key]:
        return {key.name: key for key in self.keys if not key.is_pattern}

    @functools.cached_property
    def patterns(self) -> Sequence[Key]:
        return [key for key in self.keys if key.is_pattern]

    def find(self, name: str) -> Key | None:
        """Return the key of a name, or ``None`` where the table does not have it."""
        if name in self.by_name:
            return self.by_name[name]
        return next((key for key in self.patterns if fnmatchcase(name, key.name)), None)


# ---- short ways to write them ---------------------------------------------------------------------------------------


def as_is(value: Any) -> Any:
    return OMIT if value is None else value


def positive(value: Any) -> Any:
    """Return a number above 0; others ask for nothing, as -1 does."""
    return value if isinstance(value, (int, float)) and value > 0 else OMIT


def same(name: str, topic: Topic, to: str, note: str = "", default: Any = None) -> Key:
    """Return a key whose value ours takes as it is."""
    return Key(name, topic, to, note, as_is, default)


def none(topic: Topic, reason: str, *names: str) -> list[Key]:
    """Return keys without a counterpart, for one reason."""
    return [Key(name, topic, note=reason) for name in names]
