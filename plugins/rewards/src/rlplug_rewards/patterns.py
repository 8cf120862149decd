"""Regular expressions that users write."""

from __future__ import annotations

import re

from rlplug.errors import ConfigError


def compile_pattern(key: str, pattern: str) -> re.Pattern[str]:
    """Compile a user's regular expression.

    Raises:
        ConfigError: It does not compile; the message names ``key`` and the position in the pattern.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{key} is {pattern!r}, which is not a valid regular expression: {error}. Correct it; a literal special "
            "character needs a backslash, and YAML keeps backslashes inside single quotes."
        ) from error


def compile_answer_pattern(reward: str, pattern: str) -> re.Pattern[str]:
    """Compile an ``answer_pattern``, which needs a capture group."""
    key = f"{reward}.answer_pattern"
    compiled = compile_pattern(key, pattern)
    if compiled.groups == 0:
        raise ConfigError(
            f"{key} is {pattern!r}, which has no capture group: put parentheses around the answer, "
            r"such as '<answer>(.*?)</answer>'."
        )
    return compiled


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the first group of the last match, or ``None`` when there is none."""
    found: str | None = None
    for match in pattern.finditer(text):
        found = match.group(1)
    return found
