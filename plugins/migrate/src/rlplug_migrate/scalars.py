"""Values of the command line, read as YAML 1.2 does: ``1e-6`` is a number."""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

_FLOAT: Final = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class Loader(yaml.SafeLoader):
    """PyYAML's, for which ``1e-6`` is a number and not a text."""


Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+0123456789."))


def scalar(text: str) -> Any:
    """Return the value that a text of the command line stands for; what is no YAML stays a text."""
    if "${" in text and not text.startswith("["):
        return text
    try:
        return yaml.load(text, Loader)  # a SafeLoader
    except yaml.YAMLError:
        return text
