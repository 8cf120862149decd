"""Loader of verifiers environments, with their tools and examples."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

NEEDS_ELSEWHERE = {
    "SandboxMixin": "a sandbox",
    "SandboxEnv": "a sandbox",
    "BrowserEnv": "a browser service",
    "OpenEnvEnv": "a server in a container",
    "JudgeRubric": "a judge model behind an API",
}
"""Classes of verifiers whose subclasses need an external service, and the name of that service."""


class Refusal(Exception):
    """Error of an environment, or of one of its examples, that cannot be used; the message says why."""


def load(environment: str, arguments: dict[str, Any]) -> Any:
    """Return the environment, loaded as verifiers loads it.

    Raises:
        Refusal: The environment cannot be loaded, or needs something that a trajectory here does not have.
    """
    verifiers = importlib.import_module("verifiers")
    try:
        loaded = verifiers.load_environment(environment, **arguments)
    except Exception as error:
        cause = f" ({type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ else ""
        raise Refusal(f"verifiers cannot load it: {error}{cause}") from error
    if not isinstance(loaded, verifiers.Environment):
        raise Refusal(
            f"load_environment returns a {type(loaded).__module__}.{type(loaded).__name__}; what runs here are "
            "SingleTurnEnv, MultiTurnEnv, ToolEnv, StatefulToolEnv, EnvGroup and other kin of verifiers.Environment"
        )
    for part in parts(loaded):
        for base in type(part).__mro__:
            if base.__name__ in NEEDS_ELSEWHERE:
                raise Refusal(f"its {type(part).__name__} needs {NEEDS_ELSEWHERE[base.__name__]}")
        if getattr(part, "message_type", "chat") != "chat":
            raise Refusal(f"its {type(part).__name__} has message_type {part.message_type!r}: only chat runs here")
    if any(rubric.has_group_rewards or rubric.has_advantages for rubric in parts(loaded) if hasattr(rubric, "funcs")):
        raise Refusal("its rubric scores several completions together, and here each trajectory is scored by itself")
    return loaded


def parts(environment: Any) -> Iterator[Any]:
    """Yield the environment, the members of its group, and all their rubrics."""
    yield environment
    rubrics = [environment.rubric]
    while rubrics:
        rubric = rubrics.pop()
        yield rubric
        rubrics += getattr(rubric, "rubrics", [])
    for member in getattr(environment, "envs", []):
        yield from parts(member)


def tool_schemas(environment: Any) -> list[dict[str, Any]]:
    """Return the JSON schemas of all tools, for chat templates."""
    tools = {}
    for part in parts(environment):
        for tool in getattr(part, "tool_defs", None) or []:
            tools[tool.name] = tool.model_dump(include={"name", "description", "parameters"})
    return [{"type": "function", "function": tool} for tool in tools.values()]


def examples(environment: Any, split: str, start: int, count: int) -> list[dict[str, Any]]:
    """Return ``count`` examples from ``start`` on, or as many as there are, with the prompt as chat messages."""
    dataset = environment.build_dataset() if split == "train" else environment.build_eval_dataset()
    if dataset is None:
        raise Refusal(f"it has no examples for split {split!r}: use the other one of train and eval")
    return [
        {"example": row, "messages": prompt_messages(row, index)}
        for index, row in enumerate(dataset.select(range(start, min(start + count, len(dataset)))).to_list(), start)
    ]


def prompt_messages(row: dict[str, Any], index: int) -> list[dict[str, Any]]:
    """Return the messages of an example's prompt, whose content is text, as chat templates take them.

    Tool calls get the form of OpenAI's API, with arguments as objects, and the results of tools the name of theirs.
    """
    for column, value in row.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise Refusal(f"example {index} has a {column!r} that JSON cannot hold: {error}") from error
    info = row.get("info")
    info = json.loads(info) if isinstance(info, str) and info else info
    if isinstance(info, dict) and info.get("tool_defs"):
        raise Refusal(f"example {index} brings tools of its own (info.tool_defs); here all have the environment's")
    if not isinstance(row["prompt"], list):
        raise Refusal(f"example {index} has a prompt that is not a list of chat messages")
    where, names, messages = f"the prompt of example {index}", {}, []
    for message in row["prompt"]:
        calls = [chat_call(call, where) for call in message.get("tool_calls") or []]
        names.update({call["id"]: call["function"]["name"] for call in calls if "id" in call})
        shown = as_observation({**message, "tool_calls": None}, where)
        name = message.get("name") or names.get(message.get("tool_call_id"))
        texts = {"name": name, "reasoning_content": message.get("reasoning_content")}
        shown |= {key: text for key, text in texts.items() if text}
        messages.append(shown | {"content": shown["content"] or None, "tool_calls": calls} if calls else shown)
    return messages


def chat_call(call: Any, where: str) -> dict[str, Any]:
    """Return a tool call of a prompt in the form of OpenAI's API, with its arguments as an object."""
    function = call.get("function") or call if isinstance(call, dict) else {}
    if not isinstance(function.get("name"), str):
        raise Refusal(f"{where} has a tool call without a name: {str(call)[:200]}")
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise Refusal(f"{where} has a call of {function['name']} whose arguments are no JSON: {error}") from error
    ids = {"id": call["id"]} if call.get("id") else {}
    return {"type": "function", **ids, "function": {"name": function["name"], "arguments": arguments}}


def as_observation(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message for the chat template; raise :class:`Refusal` if its content is not text."""
    content = message.get("content") or ""
    if isinstance(content, list):
        if other := next((part for part in content if part.get("type") != "text"), None):
            raise Refusal(f"{where} has a part of type {other.get('type')!r}: only text runs here")
        content = "".join(part["text"] for part in content)
    if message.get("tool_calls"):
        raise Refusal(f"{where} has an assistant's tool_calls, which is not supported")
    ids = {"tool_call_id": message["tool_call_id"]} if message.get("tool_call_id") else {}
    return {"role": message["role"], "content": content, **ids}
