"""Masks what looks like a secret in a configuration, before it is shown to others."""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

MASK: Final = "***"

_SECRET_KEY: Final = re.compile(
    r"(?:^|[_-])(?:(?:api|secret|private|access)[_-]?key|password|passwd|passphrase|secret|credentials?|authorization"
    r"|(?:access|auth|api|hf|hub|bearer|session|refresh)[_-]?token)$|^token$",
    re.IGNORECASE,
)
"""Names of options whose text is a secret. ``api_key_env`` is none, since it names a variable, nor is ``eos_token``."""
_USER_IN_URL: Final = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
_SECRET_IN_QUERY: Final = re.compile(
    r"(?P<name>[?&;][^=&#\s]*(?:key|token|secret|password|signature|credential|sig)[^=&#\s]*=)[^&#\s]+", re.IGNORECASE
)
_BEARER: Final = re.compile(r"(?P<name>\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_TOKEN: Final = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{12,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
)
"""Tokens of Hugging Face, OpenAI, GitHub, GitLab, Slack and AWS, and JSON web tokens."""


def mask_secrets(value: Any) -> Any:
    """Return a configuration with ``***`` for what looks like a secret.

    That is text under a key such as ``api_key`` or ``password``, user and password of a URL, keys in its query, and
    text of the form of a well-known token. Nothing else is recognised: a secret under another name stays.

    Args:
        value: Mappings, lists and plain values.
    """
    if isinstance(value, dict):
        return {name: _mask_value(str(name), entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [mask_secrets(entry) for entry in value]
    return mask_text(value) if isinstance(value, str) else value


def _mask_value(name: str, value: Any) -> Any:
    if _SECRET_KEY.search(name) and isinstance(value, str | int) and not isinstance(value, bool):
        return MASK if value != "" else value
    return mask_secrets(value)


def mask_text(text: str) -> str:
    """Return text with ``***`` for passwords and keys in URLs, and for well-known tokens."""
    text = _USER_IN_URL.sub(rf"\g<scheme>{MASK}@", text)
    text = _SECRET_IN_QUERY.sub(rf"\g<name>{MASK}", text)
    return _TOKEN.sub(MASK, _BEARER.sub(rf"\g<name>{MASK}", text))


def mask_yaml(text: str) -> str:
    """Return a configuration's YAML with its secrets masked; comments are lost. Other text is masked as text."""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        return mask_text(text)
    masked = mask_secrets(config)
    return text if masked == config else yaml.safe_dump(masked, sort_keys=False, allow_unicode=True, width=120)
