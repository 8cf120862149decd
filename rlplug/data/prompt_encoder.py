"""Prompts of rows: rendered, tokenised, and kept or refused by the rules of the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from transformers import PreTrainedTokenizerBase

from rlplug.data.rows import PromptRow, as_messages
from rlplug.data.tokenizing import tokenize_all, unknown_token
from rlplug.errors import ConfigError
from rlplug.interfaces.reward import Reward
from rlplug.types import Prompt

MOST_UNKNOWN: Final = 0.5
"""Share of a source's tokens that may stand for characters which the tokenizer lacks."""


@dataclass(frozen=True)
class PromptRules:
    """Rules of the policy that prompts must keep."""

    tokenizer: PreTrainedTokenizerBase
    tools: Sequence[Mapping[str, Any]]
    """JSON schemas of the functions that the policy may call in its environment."""
    max_context: int
    """Longest sequence of the policy, in tokens."""
    max_new_tokens: int
    """Longest completion, in tokens."""
    rewards: Sequence[Reward] = ()
    """Rewards that must be able to score them."""
    vocab_size: int | None = None
    """Tokens that the policy embeds."""


class PromptEncoder:
    """Encoder of rows, all alike: with the chat template or without.

    Args:
        rules: Rules of the policy.
        rows: Rows that say whether the prompts are messages, where ``chat`` does not.
        chat: ``data.chat``.
        system_prompt: ``data.system_prompt``.
        max_prompt_tokens: ``data.max_prompt_tokens``.
        too_long: ``data.too_long``.
        continue_final_message: ``data.continue_final_message``.

    Attributes:
        too_long: ``data.too_long``.
        renders_chat: Whether prompts are rendered with the chat template.
        template_tools: JSON schemas of the environment's tools when the chat template presents them, else empty.

    Raises:
        ConfigError: Rows, options and tokenizer contradict each other.
    """

    def __init__(
        self,
        rules: PromptRules,
        rows: Sequence[PromptRow],
        chat: bool | None,
        system_prompt: str | None,
        max_prompt_tokens: int | None,
        too_long: Literal["filter", "refuse"],
        continue_final_message: bool = False,
    ) -> None:
        self._rules = rules
        self._chat, self._system_prompt = chat, system_prompt
        self._max_prompt_tokens, self.too_long = max_prompt_tokens, too_long
        self._continues = continue_final_message
        self.renders_chat = self._wants_chat(rows)
        self.template_tools: Sequence[Mapping[str, Any]] = ()
        self._instructions = self._present_tools()

    def usable(self, key: str, rows: Sequence[PromptRow]) -> list[Prompt]:
        """Return the rows as prompts that are short enough, and that every reward can score.

        Raises:
            ConfigError: A row makes no such prompt; the message begins with the source's key.
        """
        prompts = self.keep(key, self.encode(key, rows))
        self.check(key, prompts)
        return prompts

    def encode(self, key: str, rows: Sequence[PromptRow]) -> list[Prompt]:
        """Return rows as prompts, of any length.

        Raises:
            ConfigError: A row cannot be rendered, has no tokens, or one that the policy does not embed.
        """
        limit, _ = self.limit()
        tokenizer = self._rules.tokenizer
        texts = [str(row.prompt) for row in rows]
        if self.renders_chat:
            from rlplug.data.chat_template import render_all

            texts = render_all(
                rows, tokenizer, self._system_prompt, self._instructions, self.template_tools, self._continues
            )
        uids = [row.uid for row in rows]
        token_ids = tokenize_all(uids, texts, tokenizer, not self.renders_chat, limit)
        messages = [as_messages(row.prompt) if self.renders_chat else () for row in rows]
        prompts = [
            Prompt(row.uid, ids, text, row.answer, row.metadata, row.source, chat)
            for row, text, ids, chat in zip(rows, texts, token_ids, messages, strict=True)
        ]
        if empty := [prompt for prompt in prompts if not prompt.token_ids]:
            fix = "give it text, or correct the model's tokenizer or chat template."
            raise ConfigError(f"{key}: the prompt {empty[0].uid!r} has no tokens: {fix}")
        known = self._rules.vocab_size
        for prompt in prompts if len(tokenizer) > (known or math.inf) else ():
            if known is not None and (largest := max(prompt.token_ids)) >= known:
                what = f"{tokenizer.decode([largest])!r}, for which the policy has no embedding: remove it."
                raise ConfigError(f"{key}: the prompt {prompt.uid!r} has the token {what}")
        return prompts

    def keep(self, key: str, prompts: list[Prompt]) -> list[Prompt]:
        """Return the prompts that are short enough, or refuse those that are not, as ``data.too_long`` says.

        Raises:
            ConfigError: One is too long, or none is left.
        """
        limit, reason = self.limit()
        kept = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
        num_filtered = len(prompts) - len(kept)
        if len(kept) == len(prompts):
            return prompts
        longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
        count = f"{key}: {num_filtered} of {len(prompts)} prompts are longer than {limit} tokens"
        details = f"{reason}; the longest, {longest.uid!r}, has {len(longest.token_ids)}."
        if self.too_long == "refuse":
            raise ConfigError(f"{count}, {details} Or set data.too_long to filter, which leaves such prompts out.")
        if not kept:
            raise ConfigError(f"{count}, so data.too_long: filter leaves none. The limit is {details}")
        if gone := sorted({prompt.source for prompt in prompts} - {prompt.source for prompt in kept}):
            raise ConfigError(f"{count}, and data.too_long: filter leaves none of {gone[0]!r}. The limit is {details}")
        rank_zero_info(f"{count} and were left out")
        return kept

    def check(self, key: str, prompts: Sequence[Prompt]) -> None:
        """Raise ``ConfigError`` for prompts that policy or reward cannot read; ``key`` is their source's."""
        if prompts and not any(prompt.text.strip() for prompt in prompts):
            raise ConfigError(f"{key}: all {len(prompts):,} prompts are blank: set prompt_key to the field of texts.")
        unknown = unknown_token(self._rules.tokenizer, self.renders_chat)
        if unknown is not None and (lacking := [prompt for prompt in prompts if unknown in prompt.token_ids]):
            self._check_unknown(key, unknown, lacking, prompts)
        for reward in self._rules.rewards:
            try:
                reward.check_prompts(prompts)
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}") from error

    def _check_unknown(self, key: str, unknown: int, lacking: Sequence[Prompt], prompts: Sequence[Prompt]) -> None:
        """Refuse prompts of which the policy could read next to nothing, and tell of others that lack something."""
        tokenizer = self._rules.tokenizer
        blind = [prompt for prompt in lacking if {unknown, *tokenizer.all_special_ids}.issuperset(prompt.token_ids)]
        share = sum(each.token_ids.count(unknown) for each in lacking) / sum(len(each.token_ids) for each in prompts)
        text = (
            f"{key}: {len(lacking):,} of {len(prompts):,} prompts have characters that the policy's tokenizer lacks: "
            f"{tokenizer.convert_ids_to_tokens(unknown)!r}, which stands for them, is {share:.1%} of all tokens, "
            f"{'and all of' if blind else 'as in'} {(blind or lacking)[0].uid!r}. Leave such prompts out, or name a "
            "model that has these characters."
        )
        if blind or share > MOST_UNKNOWN:
            raise ConfigError(text)
        rank_zero_warn(text)

    def limit(self) -> tuple[int, str]:
        """Return the longest allowed prompt, in tokens, and the reason for it with the key to change."""
        max_context, max_new_tokens = self._rules.max_context, self._rules.max_new_tokens
        fits_context = max_context - max_new_tokens
        if fits_context < 1:
            raise ConfigError(
                f"model.sampling.max_new_tokens is {max_new_tokens}, which leaves no tokens for a prompt in the "
                f"policy's context of {max_context} tokens: lower it."
            )
        if self._max_prompt_tokens is not None and self._max_prompt_tokens <= fits_context:
            return self._max_prompt_tokens, "data.max_prompt_tokens (raise it to allow them)"
        return fits_context, (
            f"the policy's context of {max_context} less model.sampling.max_new_tokens {max_new_tokens} "
            "(lower that to allow them)"
        )

    def _wants_chat(self, rows: Sequence[PromptRow]) -> bool:
        """Return whether to render prompts with the chat template: as configured, or when rows are messages."""
        messages = next((row for row in rows if not isinstance(row.prompt, str)), None)
        text = next((row for row in rows if isinstance(row.prompt, str)), None)
        if self._chat is None and messages and text:
            raise ConfigError(
                f"Some prompts are messages ({messages.uid!r}) and some are plain text ({text.uid!r}), as a source's "
                "system_prompt makes its own: set data.chat to true to make a user message of each text, or give all "
                "of them in one form."
            )
        if self._chat is False and messages:
            raise ConfigError(
                f"data.chat is false, and the prompt {messages.uid!r} is a list of messages: set data.chat to true, or "
                "give plain text."
            )
        chat = messages is not None if self._chat is None else self._chat
        if self._system_prompt is not None and not chat:
            raise ConfigError("data.system_prompt needs a chat template: set data.chat to true.")
        if getattr(self._rules.tokenizer, "chat_template_kwargs", None) and not chat:
            raise ConfigError("model.policy.chat_template_kwargs needs a chat template: set data.chat to true.")
        if chat and self._rules.tokenizer.chat_template is None:
            asked = "data.chat is true" if self._chat else f"the prompt {rows[0].uid!r} is a list of messages"
            raise ConfigError(
                f"{asked}, and the tokenizer of model.policy.path {self._rules.tokenizer.name_or_path!r} has no chat "
                "template: set data.chat to false and give plain text, or name an instruction-tuned model."
            )
        return chat

    def _present_tools(self) -> str:
        """Have the chat template present the environment's tools, or return instructions for the system message."""
        tools = self._rules.tools
        if not tools:
            return ""
        if not self.renders_chat:
            rank_zero_warn("data.chat is false, so the prompts do not describe the environment's tools to the policy.")
            return ""
        from rlplug.data.chat_template import takes_tools, tool_instructions

        if takes_tools(self._rules.tokenizer, tools):
            self.template_tools = tools
        else:
            rank_zero_info("The chat template does not present tools, so the system message describes them.")
            return tool_instructions(tools)
        return ""
