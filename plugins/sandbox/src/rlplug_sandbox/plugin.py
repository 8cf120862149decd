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
def rlplug_make_tokenizer(path: str) -> Generator[None, Any, Any]:
    """Read the tokenizer of every policy, and render its chat template, within limits."""
    from rlplug_sandbox.chat_templates import bound
    from rlplug_sandbox.tokenizer_files import require_bounded

    require_bounded(path)
    return bound((yield))
