"""Renders and tokenises prompts, each within a deadline: templates and texts come from outside."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from rlplug.data.chat_template import RENDER_S, render_chat, template_of
from rlplug.data.rows import PromptRow, as_messages
from rlplug.errors import ConfigError, describe
from rlplug.timeouts import CallBatch, CallError, TimeoutExecutor, call_within

TOKENIZE_S: Final = 120.0
"""Longest time to tokenise the texts of one chunk, in seconds."""
CHUNK: Final = 1024
"""Texts that are tokenised at once."""
CHARACTERS_PER_TOKEN: Final = 32
"""A text of more characters for each allowed token is tokenised in part, which mostly shows that it is too long."""


def render_all(
    rows: Sequence[PromptRow],
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None,
    instructions: str = "",
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """Return the chat of each row as text, up to the start of the assistant's turn.

    Args:
        system_prompt: System message in front; a row must not have one of its own then.
        instructions: Text to append to the system message.
        tools: JSON schemas of the tools that the chat template presents.

    Raises:
        ConfigError: There are two system messages, or the chat template refuses a row, or takes too long.
    """

    def attempt(row: PromptRow) -> str | ConfigError:
        try:
            return _render(row, tokenizer, system_prompt, instructions, tools)
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
) -> str:
    messages = as_messages(row.prompt)
    own = next((message for message in messages if message["role"] == "system"), None)
    if system_prompt is not None and own is not None:
        raise ConfigError(
            f"The prompt {row.uid!r} has its own system message, and data.system_prompt is set: drop one of them."
        )
    parts = [own["content"] if own is not None else system_prompt, instructions]
    if system := "\n\n".join(part for part in parts if part):
        messages = [{"role": "system", "content": system}, *(message for message in messages if message is not own)]
    roles = ", ".join(message["role"] for message in messages)
    try:
        return render_chat(messages, tokenizer, tools, f"the prompt {row.uid!r}, whose roles are {roles[:200]}")
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


def tokenize_all(
    uids: Sequence[str],
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    leading_special_tokens: bool,
    limit: int,
) -> list[tuple[int, ...]]:
    """Return the token ids of each text; an empty text has none, and one far beyond the limit only its first ones.

    Args:
        uids: Names of the texts, for messages.
        leading_special_tokens: Whether to start with the tokenizer's leading special tokens, such as its BOS, once.
        limit: Most tokens that a caller has a use for.

    Raises:
        ConfigError: The tokenizer fails at a text, or takes too long.
    """
    most = CHARACTERS_PER_TOKEN * limit + 1000
    bare = _tokens(uids, [text[:most] for text in texts], tokenizer)
    for index in [index for index, text in enumerate(texts) if len(text) > most and len(bare[index]) <= limit]:
        bare[index : index + 1] = _tokens([uids[index]], [texts[index]], tokenizer)
    prefix = []
    if leading_special_tokens and (probe := next((i for i, ids in enumerate(bare) if ids), None)) is not None:
        full: list[int] = tokenizer(texts[probe][:most], verbose=False)["input_ids"]
        body = bare[probe]
        prefix = full[: next(start for start in range(len(full)) if full[start : start + len(body)] == body)]
    return [tuple(ids if not ids or ids[: len(prefix)] == prefix else prefix + ids) for ids in bare]


def _tokens(uids: Sequence[str], texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    token_ids: list[list[int]] = []
    for start in range(0, len(texts), CHUNK):
        token_ids += _chunk_tokens(uids[start : start + CHUNK], list(texts[start : start + CHUNK]), tokenizer)
    return token_ids


def _chunk_tokens(uids: Sequence[str], texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    def tokenize() -> list[list[int]]:
        token_ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return token_ids

    try:
        return list(call_within(TOKENIZE_S, tokenize))
    except Exception as error:
        is_late = isinstance(error, CallError)
        if len(texts) > 1 and not is_late:  # find the text that it fails at
            return [_chunk_tokens([uid], [text], tokenizer)[0] for uid, text in zip(uids, texts, strict=True)]
        index = max(range(len(texts)), key=lambda index: len(texts[index]))
        reason = str(error) if is_late else f"failed ({describe(error)})"
        raise ConfigError(
            f"The tokenizer of model.policy.path {tokenizer.name_or_path!r} {reason} at the "
            f"prompt {uids[index]!r} of {len(texts[index]):,} characters: shorten or correct it."
        ) from error
