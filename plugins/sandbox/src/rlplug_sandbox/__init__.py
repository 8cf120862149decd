"""Tools for policies that call functions: schemas of the tools, parsing of the calls, and a sandbox to run them."""

from rlplug_sandbox.tool_calls import MalformedCall, ToolCall, find_calls
from rlplug_sandbox.tool_environment import ToolEnvironment
from rlplug_sandbox.tool_schema import ToolFunction, tool_functions, tool_instructions

__all__ = [
    "MalformedCall",
    "ToolCall",
    "ToolEnvironment",
    "ToolFunction",
    "find_calls",
    "tool_functions",
    "tool_instructions",
]
