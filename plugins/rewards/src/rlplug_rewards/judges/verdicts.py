"""Verdicts in a judge's answer: read strictly, so that what is malformed is an error and never a score."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from rlplug.errors import ConfigError, brief
from rlplug_rewards.patterns import compile_pattern
from rlplug_rewards.requests.json_client import malformed, strict_json

AnswerForm: TypeAlias = Literal["json", "plain", "regex"]
NUMBER: Final = re.compile(r"[+-]?(\d{1,15}(\.\d{0,15})?|\.\d{1,15})", re.ASCII)
REASON: Final = "reason"


class VerdictReader:
    """Reader of one value in an answer.

    Args:
        owner: Name of the reward's class, for messages.
        form: ``json``: an object with ``reason`` (text) and the value. ``plain``: nothing but the value. ``regex``: the
            first group of ``pattern``'s matches, which must agree.
        pattern: Regular expression with one capture group, for ``regex`` alone.
        name: Name of the value in the object.
        value_schema: JSON schema of the value.
        parse: Makes the value of a text; raises ``ValueError`` where it is none.
        check: Makes the value of what the object has; raises ``ValueError`` likewise.
    """

    def __init__(
        self,
        owner: str,
        form: AnswerForm,
        pattern: str | None,
        name: str,
        value_schema: Mapping[str, Any],
        parse: Callable[[str], Any],
        check: Callable[[Any], Any],
    ) -> None:
        if (form == "regex") != (pattern is not None):
            raise ConfigError(
                f"{owner}.answer is {form!r} and {owner}.pattern {pattern!r}: a pattern goes with answer: regex, and "
                "with no other."
            )
        self._pattern = None if pattern is None else compile_pattern(f"{owner}.pattern", pattern)
        if self._pattern is not None and self._pattern.groups != 1:
            raise ConfigError(
                f"{owner}.pattern is {pattern!r}: put exactly one pair of capturing parentheses, around the verdict."
            )
        self._form, self._name = form, name
        self._value_schema, self._parse, self._check = value_schema, parse, check

    @property
    def schema(self) -> dict[str, Any] | None:
        """JSON schema of the answer; ``None`` for a text."""
        if self._form != "json":
            return None
        return {
            "type": "object",
            "properties": {REASON: {"type": "string"}, self._name: dict(self._value_schema)},
            "required": [REASON, self._name],
            "additionalProperties": False,
        }

    def read(self, text: str) -> Any:
        """Return the value in an answer.

        Raises:
            RequestError: There is none, or more than one.
        """
        try:
            if self._form == "json":
                return self._check(self._value_of(text))
            return self._parse(text.strip() if self._pattern is None else _only_match(self._pattern, text))
        except (ValueError, RecursionError) as problem:
            raise malformed(f"the judge's answer is malformed: {problem}; it is {brief(text, 200)}") from None

    def _value_of(self, text: str) -> Any:
        found = strict_json(text)
        if not isinstance(found, dict) or set(found) - {REASON} != {self._name}:
            raise ValueError(f"it is no object with {REASON!r} and {self._name!r} alone")
        if not isinstance(found.get(REASON, ""), str):
            raise ValueError(f"its {REASON!r} is no text")
        return found[self._name]


def _only_match(pattern: re.Pattern[str], text: str) -> str:
    found = {match.group(1) for match in pattern.finditer(text)}
    if len(found) != 1:
        raise ValueError(f"the pattern matches {'nothing' if not found else 'different verdicts'}")
    (only,) = found
    if only is None:
        raise ValueError("the pattern's group is not in its match")
    return str(only).strip()


def score_reader(owner: str, form: AnswerForm, pattern: str | None, minimum: float, maximum: float) -> VerdictReader:
    """Return the reader of a number from ``minimum`` to ``maximum``."""
    if not -1e15 <= minimum < maximum <= 1e15:
        raise ConfigError(
            f"{owner}.minimum is {minimum} and {owner}.maximum {maximum}: give finite ones, the lower first."
        )

    def check(value: Any) -> float:
        if type(value) not in (int, float):
            raise ValueError(f"the score is {brief(value)}, which is no number")
        if not minimum <= value <= maximum:
            raise ValueError(f"the score {brief(value)} is not from {minimum:g} to {maximum:g}")
        return float(value)

    def parse(text: str) -> float:
        if NUMBER.fullmatch(text) is None:
            raise ValueError(f"{brief(text)} is not a plain number")
        return check(float(text))

    schema = {"type": "number", "minimum": minimum, "maximum": maximum}
    return VerdictReader(owner, form, pattern, "score", schema, parse, check)


def choice_reader(
    owner: str, form: AnswerForm, pattern: str | None, name: str, choices: Sequence[str]
) -> VerdictReader:
    """Return the reader of one of several words, in upper or lower case."""
    by_word = {choice.casefold(): choice for choice in choices}

    def check(value: Any) -> str:
        value = str(value) if type(value) is int else value
        if not isinstance(value, str) or value.casefold() not in by_word:
            raise ValueError(f"{brief(value)} is none of {', '.join(choices)}")
        return by_word[value.casefold()]

    schema = {"type": "string", "enum": list(choices)}
    return VerdictReader(owner, form, pattern, name, schema, check, check)
