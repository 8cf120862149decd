"""Messages of prompts, as data sets write them."""

from __future__ import annotations

import json
from typing import Any

from rlplug.errors import ConfigError, safe_repr


def read_messages(value: Any, where: str, prompt_key: str) -> list[dict[str, Any]]:
    """Return a prompt that is no text as messages, which chat templates take.

    Args:
        value: What the column holds.
        where: Its record, for messages.
        prompt_key: Name of the column.

    Raises:
        ConfigError: It is no list of messages of text.
    """
    expected = 'text, or a list of messages such as [{"role": "user", "content": "1 + 1 ="}]'
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: {prompt_key!r} is {safe_repr(value)}: give {expected}.")
    messages = []
    for message in value:
        if (present := _message(message)) is None:
            raise ConfigError(
                f"{where}: {prompt_key!r} has the message {safe_repr(message)}: give {expected}. Content is text or "
                "parts of text, since rlplug trains on text alone, and may be null beside tool_calls."
            )
        messages.append(present)
    return messages


def _message(message: Any) -> dict[str, Any] | None:
    """Return a message as chat templates take it, or ``None`` where it is none of text.

    Parts of text are joined. Arguments of ``tool_calls`` that are JSON as text become the objects that templates take.
    """
    if not isinstance(message, dict):
        return None
    # columnar formats set the keys that only some messages have to None in the others
    present = {key: value for key, value in message.items() if value is not None}
    calls, content = present.get("tool_calls", []), present.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = present["content"] = "".join(str(part.get("text", "")) for part in content)
    if calls and isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
        present = {"content": None} | present | {"tool_calls": [_tool_call(call) for call in calls]}
    elif calls or not isinstance(content, str):
        return None
    others = [value for key, value in present.items() if key not in ("content", "tool_calls")]
    is_text = all(isinstance(value, str) for value in others) and isinstance(content, str | None)
    return present if present.get("role") and is_text else None


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        function = function | {"arguments": json.loads(function["arguments"])}
    except ValueError:
        return call
    return call | {"function": function} if "function" in call else function
