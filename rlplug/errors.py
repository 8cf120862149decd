"""Errors that users see. Each message names the key or the part, the value, and what to do instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RLPlugError(Exception):
    """Base of every error that the command line prints as one message, without a traceback."""


class ConfigError(RLPlugError, ValueError):
    """Error in the configuration, raised before training starts."""


class PluginError(RLPlugError):
    """Error of a plugin that cannot be loaded, or of two plugins that conflict."""


class RunError(RLPlugError, RuntimeError):
    """Error that stops a run; the message says what is saved and how to go on."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the choice nearest to ``name``, or an empty string when none is near."""
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    return f" Did you mean {by_lower[near[0]]!r}?" if near else ""
