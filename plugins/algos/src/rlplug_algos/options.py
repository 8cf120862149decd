"""Refusing an option, in one sentence that names it."""

from __future__ import annotations

from rlplug.errors import ConfigError


def require(options: object, key: str, is_legal: bool, fix: str) -> None:
    """Refuse the attribute ``key`` of ``options`` unless ``is_legal``.

    Raises:
        ConfigError: It names the class, the key and the value, then says ``fix``.
    """
    if not is_legal:
        raise ConfigError(f"{type(options).__name__}'s {key} is {getattr(options, key)!r}: {fix}.")
