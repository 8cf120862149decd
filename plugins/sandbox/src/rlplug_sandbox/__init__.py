"""Tools for policies that call functions: schemas of the tools, parsing of the calls, and a sandbox to run them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplug.late_names import late_names

if TYPE_CHECKING:
    from rlplug_sandbox.tool_calls import MalformedCall, ToolCall, find_calls
    from rlplug_sandbox.tool_environment import ToolEnvironment
    from rlplug_sandbox.tool_schema import ToolFunction, tool_functions

__all__ = [
    "MalformedCall",
    "ToolCall",
    "ToolEnvironment",
    "ToolFunction",
    "find_calls",
    "tool_functions",
]

__getattr__ = late_names(
    __name__,
    {
        "MalformedCall": "tool_calls",
        "ToolCall": "tool_calls",
        "ToolEnvironment": "tool_environment",
        "ToolFunction": "tool_schema",
        "find_calls": "tool_calls",
        "tool_functions": "tool_schema",
    },
)
