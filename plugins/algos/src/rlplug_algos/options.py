"""Checks of options, with errors that name the class, the key and the value."""

from __future__ import annotations

from rlplug.errors import ConfigError


def require(options: object, key: str, is_legal: bool, fix: str) -> None:
    """Raise an error about the attribute ``key`` of ``options`` unless ``is_legal``.

    Raises:
        ConfigError: The message names the class, the key and the value, and ends with ``fix``.
    """
    if not is_legal:
        raise ConfigError(f"{type(options).__name__}'s {key} is {getattr(options, key)!r}: {fix}.")


def require_use(options: object, key: str, is_used: bool, missing: str) -> None:
    """Raise an error about a ``key`` that is not at its default and has no effect without ``missing``.

    Raises:
        ConfigError: The message names the class, the key, the value and ``missing``.
    """
    has_default = getattr(options, key) == getattr(type(options), key)
    require(options, key, is_used or has_default, f"it has no effect without {missing}; set that, or remove this")
