"""The entry point: which of our keys is that of another framework."""

from __future__ import annotations

from rlplug.plugin_manager import hookimpl

RLPLUG_API_VERSION = ">=3.3,<4"


@hookimpl
def rlplug_explain_key(name: str) -> str | None:
    from rlplug_migrate.frameworks import explain_key

    return explain_key(name)
