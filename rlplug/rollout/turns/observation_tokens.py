"""Converts an environment's observation to the tokens that follow a turn, without tokenising a turn again."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from transformers import PreTrainedTokenizerBase

from rlplug.data.chat_template import RENDER_S, most_characters, render_chat, template_of
from rlplug.errors import ConfigError
from rlplug.timeouts import CallError, call_within

if TYPE_CHECKING:
    from rlplug.interfaces.environment import Message

TURN: Final = "rlplug:turn"
"""Placeholder for the policy's turn, in a rendered conversation of which only the text after it is used."""


class ObservationTokens:
    """Converter of observations to token ids.

    With a chat template, an observation becomes the text that the template writes between the end of an assistant's
    message and the start of the next one. Without a template, it is its own text. Control tokens in an observation,
    such as ``<|im_end|>``, are broken up by a space, so that they stay text.

    Args:
        tokenizer: The policy's tokenizer.
        chat: Whether prompts were rendered with its chat template.
        tools: Tool schemas that the template presents, the same as for the prompts.
        has_tools: Whether observations may be results of tools. A template that refuses the role ``tool`` gets them as
            user messages, in ``<tool_response>`` tags.

    Raises:
        ConfigError: The chat template cannot render an observation.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        has_tools: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        self._control_tokens = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
        self._chat = chat
        self._tools = tools
        self._takes_tool_role = True
        if chat and has_tools:
            try:
                self._probe({"role": "tool", "name": "probe", "content": "1"})
            except ConfigError:
                self._takes_tool_role = False
        if chat:
            self._probe({"role": "user", "content": "1"})

    @functools.cached_property
    def characters_per_token(self) -> int:
        """Most characters of a text, per token."""
        return most_characters(1, self._tokenizer)

    def text(self, observation: str | Sequence[Message]) -> str:
        """Return what the tokenizer gets for an observation of text or messages.

        Raises:
            ConfigError: The chat template cannot render the messages.
        """
        text = observation if isinstance(observation, str) else None
        messages = [{"role": "user", "content": text}] if text is not None else [dict(each) for each in observation]  # type: ignore[arg-type]
        messages = [message | {"content": self._without_control_tokens(message["content"])} for message in messages]
        return self._rendered(messages) if self._chat else "\n".join(message["content"] for message in messages)

    def after(self, last_token: int, text: str) -> list[int]:
        """Return the tokens that follow a turn.

        Args:
            last_token: Id of the turn's last token. A chat template's text begins with the token that ends a message,
                which is left out if the policy has sampled it already.
            text: What :meth:`text` made of the observation.
        """
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return token_ids[1:] if self._chat and token_ids[:1] == [last_token] else token_ids

    def _without_control_tokens(self, text: str) -> str:
        """Return ``text`` with a space inside each of the tokenizer's special tokens."""
        for token in sorted(self._control_tokens, key=len, reverse=True):
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _probe(self, message: Message) -> None:
        """Render one observation, in time; ``ConfigError`` where the chat template refuses it, or loops."""
        try:
            call_within(RENDER_S, lambda: self._rendered([message]))
        except CallError as problem:
            raise ConfigError(
                f"{template_of(self._tokenizer)} {problem} for a message of role {message['role']}."
            ) from None

    def _rendered(self, messages: Sequence[Message]) -> str:
        """Return the template's text between a turn and the next one, with ``messages`` in it."""
        if not self._takes_tool_role:
            messages = [_as_user(message) for message in messages]
        begin = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}]
        roles = ", ".join(message["role"] for message in messages)
        what = f"an observation of roles {roles} after a turn"
        _, found, piece = render_chat([*begin, *messages], self._tokenizer, self._tools, what).partition(TURN)
        if not found or TURN in piece:
            raise ConfigError(
                f"{template_of(self._tokenizer)} leaves out or repeats what the assistant said before roles {roles}."
            )
        return piece


def _as_user(message: Message) -> Message:
    if message["role"] != "tool":
        return message
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
