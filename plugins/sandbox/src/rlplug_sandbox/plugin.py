"""The entry point: what this distribution registers. The classes are imported when a run names them."""

from collections.abc import Generator
from typing import Any

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry

RLPLUG_API_VERSION = ">=3,<4"


@hookimpl
def rlplug_register_environments(registry: Registry) -> None:
    registry.add("environments", "rlplug_sandbox.tool_environment:ToolEnvironment")


@hookimpl(wrapper=True)
def rlplug_make_tokenizer() -> Generator[None, Any, Any]:
    """Render the chat template of every policy within limits."""
    from rlplug_sandbox.chat_templates import bound

    return bound((yield))
