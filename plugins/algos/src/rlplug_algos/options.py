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


def require_use(options: object, key: str, is_used: bool, missing: str) -> None:
    """Refuse a ``key`` that was given another value than its default and has no effect without ``missing``.

    Raises:
        ConfigError: It names the class, the key, the value and ``missing``.
    """
    has_default = getattr(options, key) == getattr(type(options), key)
    require(options, key, is_used or has_default, f"it has no effect without {missing}; set that, or remove this")
