"""``PromptRow``, one task before tokenisation, and ``PromptSource`` and ``RowStream``, which give rows."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from rlplug.errors import ConfigError, brief, encodable
from rlplug.interfaces.plain_values import json_problem


def as_messages(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a prompt as chat messages; plain text is one of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


@dataclass(frozen=True)
class PromptRow:
    """One task before tokenisation.

    Attributes:
        uid: Stable name within its source, such as ``train.jsonl:17``.
        prompt: Plain text, or chat messages with ``role`` and ``content``.
        answer: Reference answer for verifiers; ``None`` when the task has none.
        source: Name of its source in a mixture, which :class:`~rlplug.data.mixture.MixtureSource` sets.
    """

    uid: str
    prompt: str | list[dict[str, Any]]
    answer: Any
    metadata: Mapping[str, Any]
    source: str = ""


def of_part(row: PromptRow, name: str) -> PromptRow:
    """Return a row of the part ``name``, with a uid that no other part has; rows without a name stay as they are."""
    return replace(row, uid=f"{name}/{row.uid}", source=name) if name else row


class RowStream(ABC):
    """Rows of a source that is read pass by pass, with a place that can be saved."""

    shuffle_buffer: int = 1000
    """Rows in a block, in which the order is drawn anew."""

    @abstractmethod
    def begin(self, order: torch.Generator | None) -> None:
        """Begin a pass; with ``order``, its parts (files) may be read in another order, drawn from the generator."""

    @abstractmethod
    def read(self) -> PromptRow | None:
        """Return the next row, or ``None`` at the end of the pass."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the place as plain data: the next row is the one after those that were read."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place, in a pass that may not have begun here."""


class PromptSource(ABC):
    """Base class of prompt sources: a finite, ordered collection of tasks."""

    weights: Mapping[str, float] = MappingProxyType({})
    """Shares of a mixture's sources, by name; empty for any other source."""

    @abstractmethod
    def rows(self) -> Iterator[PromptRow]:
        """Yield every row, in the same order and with the same uids each time and on every rank.

        Raises:
            ConfigError: The source cannot be read; the message says what to write instead.
        """

    def stream(self) -> RowStream | None:
        """Return the rows as a stream to read while training, or ``None`` when all are read at the start."""
        return None

    def parts(self) -> Mapping[str, PromptSource]:
        """Return the sources of a mixture by name; of another source itself, under an empty name."""
        return {"": self}


def check_row(row: Any) -> None:
    """Check a row of any source.

    Raises:
        ConfigError: It has no name or prompt, a prompt that no tokenizer can encode, or values of too many levels.
    """
    if not isinstance(row, PromptRow) or not isinstance(row.uid, str):
        raise ConfigError(f"{brief(row)} is no PromptRow with a uid of text: correct the source.")
    if problem := json_problem(row.uid) or json_problem(row.prompt):
        raise ConfigError(f"{encodable(row.uid)}: the prompt has {problem}.")
    for name, value in {"answer": row.answer, "metadata": row.metadata}.items():
        if problem := json_problem(value, is_json=False):
            raise ConfigError(f"{row.uid}: the {name} has {problem}.")


def optional_import(module: str, requirement: str, needed_by: str) -> Any:
    """Return a module that a source needs.

    Raises:
        ConfigError: It cannot be imported; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{needed_by} needs {module} ({error}): run pip install {requirement}") from error
