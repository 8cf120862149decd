"""The policy's chat template, a program from outside: it may raise anything, loop, or write megabytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from rlplug.errors import ConfigError, describe, encodable

RENDER_S: Final = 30.0
"""Longest time for a chat template to render one conversation, in seconds."""


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]],
    what: str,
) -> str:
    """Return a conversation as text, up to the start of the assistant's turn.

    Nothing here ends a template that loops: call it where a deadline holds, as :mod:`rlplug.timeouts` has them.

    Args:
        tools: JSON schemas of the tools that the template presents.
        what: Name of the conversation in the error, such as ``the prompt 'train.jsonl:17'``.

    Raises:
        ConfigError: The template cannot render the conversation.
    """
    schemas: Any = [dict(tool) for tool in tools] or None
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tools=schemas, add_generation_prompt=True, tokenize=False
        )
    except Exception as error:
        reason = encodable(str(error)) if type(error).__module__.startswith("jinja2.") else describe(error)
        raise ConfigError(f"{template_of(tokenizer)} refuses {what}: {reason.rstrip('.')}") from error
    return encodable(str(text))


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the name of the chat template, for messages."""
    return f"The chat template of model.policy.path {tokenizer.name_or_path!r}"


def most_characters(num_tokens: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return a length in characters beyond which a text has more than ``num_tokens`` tokens, without tokenising it.

    It is four times what the longest token would fill, for tokenizers that drop white space or have a token for
    unknown words.
    """
    return 4 * num_tokens * max(map(len, tokenizer.get_vocab())) + 1000


def tool_instructions(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Return a description of tools in the hermes format, for a system prompt when the chat template has none.

    Args:
        schemas: Schemas as :meth:`rlplug.interfaces.environment.Environment.tools` returns them.
    """
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return (
        "You may call one or more functions to help with the user's question.\n\n"
        f"Their signatures are within <tools></tools> tags:\n<tools>\n{lines}\n</tools>\n\n"
        "For each call, write a JSON object with the function's name and arguments within <tool_call></tool_call> "
        'tags:\n<tool_call>\n{"name": "<function name>", "arguments": {"<argument name>": <value>}}\n</tool_call>\n\n'
        "The results come in the next message. When you need no more calls, answer without a tag."
    )
