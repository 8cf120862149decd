"""Prompt templates of judges: jinja2 in its sandbox, from a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox

from rlplug.errors import ConfigError, describe, did_you_mean
from rlplug.types import Sample
from rlplug_rewards.requests.json_client import malformed

OF_PROMPT = ("prompt", "answer", "metadata")


class PromptTemplate:
    """A template in a file, which may use the given names alone.

    The sandbox keeps the template from Python's attributes and from changing what it is given. A name that it does not
    get is an error when it is read, not an empty text.

    Args:
        owner: Name of the reward's class, for messages.
        path: The file, UTF-8.
        names: What the template gets.
        needed: Of those, it must use at least one.

    Raises:
        ConfigError: The file cannot be read or used.
    """

    def __init__(self, owner: str, path: str, names: Iterable[str], needed: Iterable[str]) -> None:
        self._key = f"{owner}.template"
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise ConfigError(f"{self._key} is {path!r}, which cannot be read ({describe(problem)}).") from None
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, autoescape=False, keep_trailing_newline=True
        )
        try:
            used = jinja2.meta.find_undeclared_variables(environment.parse(text))
            self._template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as problem:
            raise ConfigError(f"{self._key} is {path!r}, and its line {problem.lineno}: {problem.message}.") from None
        names, needed = list(names), list(needed)
        for name in sorted(used - set(names)):
            raise ConfigError(
                f"{self._key} is {path!r}, which uses {name!r}.{did_you_mean(name, names)} It gets {', '.join(names)}."
            )
        if not used & set(needed):
            raise ConfigError(
                f"{self._key} is {path!r}, which uses none of {', '.join(needed)}: the judge would not see what it "
                "judges."
            )

    def render(self, sample: Sample, **values: Any) -> str:
        """Return the text for a sample's prompt and further values.

        Raises:
            RequestError: The template fails on them.
        """
        prompt = sample.prompt
        try:
            return self._template.render(prompt=prompt.text, answer=prompt.answer, metadata=prompt.metadata, **values)
        except Exception as problem:  # noqa: BLE001 - a template's operators may raise anything
            raise malformed(f"{self._key} failed on this sample: {describe(problem)}") from None
