"""Renders with the policy's chat template, a program from outside: it may raise anything, loop, or write megabytes."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jinja2 import TemplateError, meta, pass_context
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from rlplug.data.rows import PromptRow, as_messages
from rlplug.errors import ConfigError, describe, did_you_mean, encodable
from rlplug.timeouts import CallBatch, CallError, TimeoutExecutor, call_within

RENDER_S: Final = 30.0
"""Longest time for a chat template to render one conversation, in seconds."""


def render_all(
    rows: Sequence[PromptRow],
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None,
    instructions: str = "",
    tools: Sequence[Mapping[str, Any]] = (),
    continue_final_message: bool = False,
) -> list[str]:
    """Return the chat of each row as text, up to the start of the assistant's turn.

    Args:
        system_prompt: System message in front; a row must not have one of its own then.
        instructions: Text to append to the system message.
        tools: JSON schemas of the tools that the chat template presents.
        continue_final_message: Leave a last message of the assistant open, which is refused otherwise.

    Raises:
        ConfigError: There are two system messages, or the chat template refuses a row, or takes too long.
    """

    def attempt(row: PromptRow) -> str | ConfigError:
        try:
            return _render(row, tokenizer, system_prompt, instructions, tools, continue_final_message)
        except ConfigError as error:
            return error

    executor, batch = TimeoutExecutor(RENDER_S, 1), CallBatch()
    calls = executor.add(batch, [functools.partial(attempt, row) for row in rows], [lambda text: text] * len(rows))
    while batch.num_unsettled:
        if any(call.error or isinstance(call.value, ConfigError) for call in executor.settled(batch, RENDER_S)):
            batch.drop_waiting()
            break
    for row, call in zip(rows, calls, strict=True):
        if isinstance(call.value, ConfigError):
            raise call.value
        if call.error:
            raise ConfigError(f"{template_of(tokenizer)} {call.error} for the prompt {row.uid!r}: correct one of them.")
    return [call.value for call in calls]


def _render(
    row: PromptRow,
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None,
    instructions: str,
    tools: Sequence[Mapping[str, Any]],
    continue_final_message: bool,
) -> str:
    messages = as_messages(row.prompt)
    continues = messages[-1]["role"] == "assistant"
    if continues and not continue_final_message:
        raise ConfigError(
            f"The prompt {row.uid!r} ends with a message of the assistant: set data.continue_final_message to true to "
            "have the policy continue it, or leave that message out."
        )
    own = next((message for message in messages if message["role"] == "system"), None)
    if system_prompt is not None and own is not None:
        raise ConfigError(
            f"The prompt {row.uid!r} has its own system message, and data.system_prompt is set: drop one of them."
        )
    parts = [own["content"] if own is not None else system_prompt, instructions]
    if system := "\n\n".join(part for part in parts if part):
        messages = [{"role": "system", "content": system}, *(message for message in messages if message is not own)]
    roles = ", ".join(message["role"] for message in messages)
    what = f"the prompt {row.uid!r}, whose roles are {roles[:200]}"
    try:
        text = render_chat(messages, tokenizer, tools, what, continues)
        for call in (call for message in messages for call in message.get("tool_calls") or ()):
            if call.get("function", call).get("name", "") not in text:
                raise ConfigError(f"{template_of(tokenizer)} leaves out the tool calls of {what}")
        return text
    except ConfigError as error:
        raise ConfigError(
            f"{error}. Change the prompt's messages, or take a model whose template accepts them."
        ) from error


def takes_tools(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the chat template presents tools.

    Raises:
        ConfigError: It refuses a user's message, with or without tools, or takes too long.
    """
    messages, what = [{"role": "user", "content": "?"}], "a user's message beside the environment's tools"
    try:
        return bool(
            call_within(
                RENDER_S,
                lambda: render_chat(messages, tokenizer, tools, what) != render_chat(messages, tokenizer, (), what),
            )
        )
    except CallError as problem:
        raise ConfigError(f"{template_of(tokenizer)} {problem} for {what}. Correct the template.") from None


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]],
    what: str,
    continues: bool = False,
) -> str:
    """Return a conversation as text, up to the start of the assistant's turn.

    Nothing here ends a template that loops: call it where a deadline holds, as :mod:`rlplug.timeouts` has them.

    Args:
        tools: JSON schemas of the tools that the template presents.
        what: Name of the conversation in the error, such as ``the prompt 'train.jsonl:17'``.
        continues: Whether the last message is that turn's beginning.

    Raises:
        ConfigError: The template cannot render the conversation.
    """
    schemas: Any = [dict(tool) for tool in tools] or None
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=schemas,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            tokenize=False,
            **getattr(tokenizer, "chat_template_kwargs", {}),
        )
    except Exception as error:
        reason = encodable(str(error)) if type(error).__module__.startswith("jinja2.") else describe(error)
        raise ConfigError(f"{template_of(tokenizer)} refuses {what}: {reason.rstrip('.')}") from error
    if len(text) > 1_000_000 + 16 * len(str([*messages, *tools])):
        raise ConfigError(f"{template_of(tokenizer)} writes {len(text):,} characters for {what}")
    return encodable(str(text))


def set_chat_template_kwargs(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
    """Have :func:`render_chat` give the chat template values of its own variables.

    Raises:
        ConfigError: The template reads no such variable, or cannot be read.
    """
    key, template = "model.policy.chat_template_kwargs", tokenizer.chat_template
    known: set[str] = set()
    for text in template.values() if isinstance(template, dict) else [template or ""]:
        try:
            environment = _compile_jinja_template("").environment
            environment.finalize = pass_context(lambda _, value: value)  # so that no constant is computed here
            finder = meta.TrackingCodeGenerator(environment)
            finder.optimizer = None
            finder.visit(environment.parse(text))
            known |= finder.undeclared_identifiers - environment.globals.keys()
        except TemplateError as error:
            raise ConfigError(f"{template_of(tokenizer)} cannot be read: {encodable(str(error))}.") from error
    known -= {"messages", "tools", "documents", "add_generation_prompt", *tokenizer.special_tokens_map}
    for name in kwargs.keys() - known:
        raise ConfigError(
            f"{key} has {name!r}, which is no variable of t{template_of(tokenizer)[1:]}.{did_you_mean(name, known)} It "
            f"reads {', '.join(sorted(known)) or 'none'}."
        )
    tokenizer.chat_template_kwargs = dict(kwargs)


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
