"""``Columns``: from the columns of a record to prompt, answer and metadata."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeAlias

from rlplug.data.rows import as_messages
from rlplug.errors import ConfigError, did_you_mean, encodable, safe_repr

DEFAULT_PROMPT_KEY: Final = "prompt"
DEFAULT_ANSWER_KEY: Final = "answer"

Messages: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True)
class Columns:
    """Rules by which a record becomes a prompt, an answer and metadata.

    A name with dots that no column has is that of a value inside one: ``reward_model.ground_truth``, or
    ``choices.0`` of a list.

    Args:
        prompt_key: Column with the prompt, text or messages, unless there is a template.
        answer_key: Column with the answer; the default may be absent.
        renamed: New names of columns by their names; what follows uses the new ones.
        template: Text of the prompt, with columns in braces; ``{{`` and ``}}`` are braces. ``{choices:letters}`` puts
            a letter in front of each item of a list.
        system_prompt: System message in front of the prompt, which becomes messages.

    Raises:
        ConfigError: The template cannot be read, or contradicts another rule.
    """

    prompt_key: str = DEFAULT_PROMPT_KEY
    answer_key: str = DEFAULT_ANSWER_KEY
    renamed: Mapping[str, str] = field(default_factory=dict)
    template: str | None = None
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        if self.template is not None and self.prompt_key != DEFAULT_PROMPT_KEY:
            raise ConfigError(
                f"data source template makes the prompt, and prompt_key is {self.prompt_key!r}: drop one of them, or "
                f"write {{{self.prompt_key}}} in the template."
            )
        if self.template is not None and not any(name for _, name, _ in self._parts):
            raise ConfigError(
                f"data source template {safe_repr(self.template)} names no column: write one in braces, such as "
                "{question}."
            )
        if len(set(self.renamed.values())) < len(self.renamed):
            raise ConfigError(f"data source columns {dict(self.renamed)} gives two columns one name: use it once.")

    def read(self, record: Mapping[str, Any], where: str, is_first: bool) -> tuple[str | Messages, Any, dict[str, Any]]:
        """Return prompt, answer and metadata of a record, which ``where`` names in errors.

        Rules that fit the first record of a source are right, so that a later one without a column is to be corrected.

        Raises:
            ConfigError: A column is absent or has a value of another form; the message names it.
        """
        fields = self._rename(record, where, is_first)
        needed = {name: _value_of(fields, name, where, fix, is_first) for name, fix in self._needed.items()}
        if self.template is None:
            prompt = needed[self.prompt_key]
            if not isinstance(prompt, str):
                from rlplug.data.messages import read_messages

                prompt = read_messages(prompt, where, self.prompt_key)
            used = {self.prompt_key, self.answer_key}
        else:
            prompt, used = self._fill(needed, where), {self.answer_key}
        if self.system_prompt is not None:
            prompt = self._with_system_prompt(prompt, where)
        metadata = {name: value for name, value in fields.items() if name not in used}
        return prompt, needed.get(self.answer_key, fields.get(self.answer_key)), metadata

    @cached_property
    def _needed(self) -> dict[str, str]:
        """Columns that each record must have, and what to change where the first record has none."""
        needed = {} if self.answer_key == DEFAULT_ANSWER_KEY else {self.answer_key: "set answer_key to one of them"}
        if self.template is None:
            return {**needed, self.prompt_key: "set prompt_key to one of them"}
        return needed | {name: "correct the template" for _, name, _ in self._parts if name is not None}

    def _rename(self, record: Mapping[str, Any], where: str, is_first: bool) -> Mapping[str, Any]:
        if not self.renamed:
            return record
        found = {new: _value_of(record, name, where, "correct columns", is_first) for name, new in self.renamed.items()}
        kept = record.keys() - self.renamed.keys()
        if taken := sorted(kept & set(self.renamed.values())):
            raise ConfigError(
                f"{where} has a column {taken[0]!r}, and columns gives another one that name: give it another name, or "
                f"rename {taken[0]!r} too."
            )
        return {name: value for name, value in record.items() if name in kept} | found

    @cached_property
    def _parts(self) -> list[tuple[str, str | None, bool]]:
        """Return the pieces of the template: text, the column behind it or ``None``, and if it has letters."""
        try:
            found = list(string.Formatter().parse(self.template or ""))
        except ValueError as error:
            raise ConfigError(
                f"data source template {safe_repr(self.template)}: {error}. Write {{{{ and }}}} for braces."
            ) from None
        for _, name, specification, conversion in found:
            if name is not None and (not name or specification not in ("", "letters") or conversion):
                raise ConfigError(
                    f"data source template {safe_repr(self.template)} has {{{name}}} with something other than a name "
                    "of a column: write {question}, {choices:letters} for a list with letters, and {{ and }} for "
                    "braces that are text."
                )
        return [(text, name, specification == "letters") for text, name, specification, _ in found]

    def _fill(self, fields: Mapping[str, Any], where: str) -> str:
        texts = []
        for text, name, has_letters in self._parts:
            texts.append(text)
            if name is None:
                continue
            value = fields[name]
            items = value if isinstance(value, list) else [value]
            # NaN, which pandas has for a gap, is no number
            if not items or not all(isinstance(item, str | int | float) and item == item for item in items):
                raise ConfigError(
                    f"{where}: {name!r} is {safe_repr(value)}, and template takes text, a number or a list of them "
                    "from it: correct the record or the template."
                )
            if has_letters and (not isinstance(value, list) or len(value) > len(string.ascii_uppercase)):
                raise ConfigError(
                    f"{where}: {name!r} is {safe_repr(value)}, and template puts letters in front of its items: give a "
                    "list of at most 26, or leave out :letters."
                )
            letters = [f"{letter}. " for letter in string.ascii_uppercase] if has_letters else [""] * len(items)
            texts.append("\n".join(f"{letter}{item}" for letter, item in zip(letters, items, strict=False)))
        return "".join(texts)

    def _with_system_prompt(self, prompt: str | Messages, where: str) -> Messages:
        assert self.system_prompt is not None
        messages = as_messages(prompt)
        if any(message["role"] == "system" for message in messages):
            raise ConfigError(f"{where} has its own system message, and the source's system_prompt is set: drop one.")
        return [{"role": "system", "content": self.system_prompt}, *messages]


def _value_of(fields: Mapping[str, Any], name: str, where: str, fix: str, is_first: bool) -> Any:
    """Return the column of that name, or the value inside one; a ``ConfigError`` says what is there instead."""
    if name in fields:
        return fields[name]
    value: Any = fields
    gone = ""
    for part in name.split("."):
        inner = dict(zip(map(str, range(len(value))), value, strict=True)) if isinstance(value, list) else value
        if not isinstance(inner, Mapping) or part not in inner:
            break
        value, gone = inner[part], f"{gone}{part}."
    else:
        return value
    there = [f"{gone}{key}" for key in inner] if isinstance(inner, Mapping) else [gone.removesuffix(".")]
    listed = encodable(", ".join(there)[:500]) or "none"
    if not is_first:
        raise ConfigError(
            f"{where} has no field {name!r}, and the rows before it have one; its fields are {listed}: correct that "
            "row."
        )
    raise ConfigError(
        f"{where} has no field {name!r}; its fields are {listed}.{did_you_mean(name, there)} If all rows are like "
        f"that, {fix}; else correct that row."
    )
