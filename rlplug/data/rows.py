"""``PromptRow``, one task before tokenisation."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

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
        source: Name of its source in a mixture; empty without one.
    """

    uid: str
    prompt: str | list[dict[str, Any]]
    answer: Any
    metadata: Mapping[str, Any]
    source: str = ""


def of_part(row: PromptRow, name: str) -> PromptRow:
    """Return a row of the part ``name``, with a uid that no other part has; rows without a name stay as they are."""
    return replace(row, uid=f"{name}/{row.uid}", source=name) if name else row


def check_row(row: Any) -> PromptRow:
    """Return a checked copy of a row, which what the source changes later does not reach.

    Raises:
        ConfigError: It has no name or prompt, a prompt that no tokenizer can encode, or values of too many levels.
    """
    if not isinstance(row, PromptRow) or not isinstance(row.uid, str):
        raise ConfigError(f"{brief(row)} is no PromptRow with a uid of text: correct the source.")
    if problem := json_problem(row.uid) or json_problem(row.prompt):
        raise ConfigError(f"{encodable(row.uid)}: the prompt has {problem}. Correct it.")
    for name, value in {"answer": row.answer, "metadata": row.metadata}.items():
        if problem := json_problem(value, is_json=False):
            raise ConfigError(f"{row.uid}: the {name} has {problem}. Correct it.")
    return replace(row, **copy.deepcopy({"prompt": row.prompt, "answer": row.answer, "metadata": dict(row.metadata)}))


def optional_import(module: str, requirement: str, needed_by: str) -> Any:
    """Return a module that a source needs.

    Raises:
        ConfigError: It cannot be imported; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{needed_by} needs {module} ({error}): run pip install {requirement}") from error
