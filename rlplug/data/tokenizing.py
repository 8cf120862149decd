"""Tokenises prompts within a deadline: texts come from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from transformers import PreTrainedTokenizerBase

from rlplug.errors import ConfigError, describe
from rlplug.timeouts import CallError, call_within

TOKENIZE_S: Final = 120.0
"""Longest time to tokenise the texts of one chunk, in seconds."""
CHUNK: Final = 1024
"""Texts that are tokenised at once."""
CHARACTERS_PER_TOKEN: Final = 32
"""A text of more characters for each allowed token is tokenised in part, which mostly shows that it is too long."""


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


def unknown_token(tokenizer: PreTrainedTokenizerBase, renders_chat: bool) -> int | None:
    """Return the special token for what a tokenizer lacks; ``None`` where it has all, or templates write that token."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    token = getattr(model, "unk_token", tokenizer.unk_token)
    is_written = renders_chat and token in (tokenizer.bos_token, tokenizer.eos_token)
    is_special = token in tokenizer.all_special_tokens
    return tokenizer.get_vocab().get(str(token)) if is_special and not is_written else None


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
