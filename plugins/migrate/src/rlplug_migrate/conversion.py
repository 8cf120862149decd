"""Makes our configuration of another framework's: direct keys first, then what several decide together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlplug.errors import ConfigError, describe
from rlplug_migrate.keys import OMIT, Framework


@dataclass(frozen=True)
class Unresolved:
    """A value that cannot be known from the file: a variable of the shell, or a reference."""

    text: str
    reason: str


class Given:
    """What a configuration says, by key, with the framework's defaults behind it.

    Args:
        framework: The framework.
        values: The values by full key.
        num_gpus: GPUs of the run, where its sizes are per GPU and its configuration does not say.
    """

    def __init__(self, framework: Framework, values: Mapping[str, Any], num_gpus: int | None = None) -> None:
        self.framework = framework
        self.values = values
        self.num_gpus = num_gpus

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None and not isinstance(self.values[name], Unresolved)

    def __getitem__(self, name: str) -> Any:
        """Return the value of a key, or the framework's default; ``None`` where there is neither."""
        if name in self:
            return self.values[name]
        key = self.framework.by_name.get(name)
        return None if key is None else key.default

    def first(self, *names: str) -> Any:
        """Return the value of the first key that is given, or the first default; ``None`` where there is none."""
        found = [self[name] for name in (*filter(self.__contains__, names), *names)]
        return next((value for value in found if value is not None), None)

    def below(self, prefix: str) -> dict[str, Any]:
        """Return the values of all keys that begin with ``prefix``, by the rest of their names."""
        return {
            name.removeprefix(prefix): self[name] for name in self.values if name.startswith(prefix) and name in self
        }


@dataclass
class Draft:
    """What a configuration becomes.

    Args:
        given: The configuration.
    """

    given: Given
    settings: dict[str, Any] = field(default_factory=dict)
    """Our values by full key."""
    from_defaults: dict[str, str] = field(default_factory=dict)
    """Our keys whose value is the framework's default, with a comment that says so."""
    lacking: dict[str, str] = field(default_factory=dict)
    """Reasons by keys that became nothing."""
    changed: list[tuple[str, str, str]] = field(default_factory=list)
    """Their key, ours, and what it means that theirs does not."""

    def set(self, key: str, value: Any, of: str) -> None:
        """Set our ``key``, because of the key ``of``."""
        self.settings[key] = value
        if of not in self.given:
            theirs = f"; that of {of} is not resolved" if of in self.given.values else ""
            self.from_defaults[key] = f"default of {self.given.framework.name}{theirs}"

    def append(self, key: str, item: dict[str, Any]) -> None:
        """Append to our ``key``, a list."""
        self.settings.setdefault(key, []).append(item)

    def lacks(self, name: str, reason: str) -> None:
        """Say why a key, if it is given, has no counterpart here."""
        if name in self.given:
            self.lacking[name] = reason

    def note(self, name: str, key: str, text: str) -> None:
        """Say what our ``key`` means that ``name`` does not."""
        self.changed.append((name, key, text))


def convert(given: Given) -> Draft:
    """Return what a configuration becomes here."""
    draft = Draft(given)
    for name, value in given.values.items():
        _direct(draft, name, value)
    for key in given.framework.keys:
        if key.read is not None and key.default is not None and key.name not in given:
            draft.set(key.to, key.read(key.default), key.name)
    for rule in given.framework.rules:
        try:
            rule(given, draft)
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            name = given.framework.name
            raise ConfigError(
                f"a value is of another kind than {name} takes: {describe(error)}. Correct it."
            ) from error
    _notes(draft)
    return draft


def _direct(draft: Draft, name: str, value: Any) -> None:
    """Write what one key decides alone, or why it becomes nothing."""
    framework = draft.given.framework
    key = framework.find(name)
    if isinstance(value, Unresolved):
        draft.lacking[name] = value.reason
    elif key is None:
        draft.lacking[name] = f"not known: it is no key of {framework.name} {framework.version}"
    elif not key.to:
        if not _is_off(value):
            draft.lacking[name] = key.note
    elif key.read is not None and (read := key.read(value)) is not OMIT:
        draft.set(key.to, read, name)


def _is_off(value: Any) -> bool:
    """Return whether a value asks for nothing."""
    return value is None or value is False or value in ("", "null", "none") or value == [] or value == {}


def _notes(draft: Draft) -> None:
    """Add what direct keys mean here, where they were written."""
    for name in draft.given.values:
        key = draft.given.framework.find(name)
        if key and key.to and key.note and any(to in draft.settings for to in key.to.split(", ")):
            draft.note(name, key.to, key.note)
