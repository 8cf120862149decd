"""Tools for policies that call functions: schemas of the tools, parsing of the calls, and a sandbox to run them."""

from rlplug.environments.tool_calls import MalformedCall, ToolCall, find_calls
from rlplug.environments.tool_environment import ToolEnvironment
from rlplug.environments.tool_schema import ToolFunction, tool_functions, tool_instructions

__all__ = [
    "MalformedCall",
    "ToolCall",
    "ToolEnvironment",
    "ToolFunction",
    "find_calls",
    "tool_functions",
    "tool_instructions",
]
