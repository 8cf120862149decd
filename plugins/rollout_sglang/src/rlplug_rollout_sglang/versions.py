"""Which SGLang is installed, whether this plugin knows it, and which arguments it takes. SGLang is not imported."""

from __future__ import annotations

import ast
from importlib.resources.abc import Traversable
from typing import Final

from packaging.version import Version
from rlplug_engines.colocated import SupportedVersions, declared_fields, package_folder

OLDEST: Final = Version("0.5.13")
NEWEST: Final = Version("0.5.24")
"""The first that is too new. The code was read in 0.5.13, 0.5.16 and 0.5.23; 0.5.16 and 0.5.23 ran on a GPU."""

INSTALL: Final = "pip install 'rlplug-rollout-sglang[cuda]'"
VERSIONS: Final = SupportedVersions("SGLang", "rlplug-rollout-sglang", OLDEST, NEWEST, INSTALL)


def require_sglang() -> Version:
    """Return the version of the SGLang that is installed.

    Raises:
        ConfigError: It is not installed, or not of a version that is known.
    """
    return VERSIONS.require_distribution("sglang")


def sglang_argument_names() -> set[str]:
    """Return the names of the arguments of the installed SGLang's ``ServerArgs``."""
    return argument_names(package_folder("sglang"))


def argument_names(package: Traversable) -> set[str]:
    """Return the names of the arguments of ``ServerArgs``, as the source of an SGLang package has them.

    It is a dataclass, and since about 0.5.20 a struct that is put together from a list of its fields.
    """
    names = declared_fields((package / "srt" / "server_args.py").read_text()).get("ServerArgs", set())
    fields = package / "srt" / "arg_groups" / "field_order.py"
    if fields.is_file():
        for node in ast.parse(fields.read_text()).body:
            if isinstance(node, ast.Assign):
                names |= set(ast.literal_eval(node.value))
    assert {"model_path", "tp_size"} <= names, "ServerArgs is elsewhere in this SGLang"
    return names
