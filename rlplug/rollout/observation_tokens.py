"""Converts an environment's observation to the tokens that follow a turn, without tokenising a turn again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2
from transformers import PreTrainedTokenizerBase

from rlplug.errors import ConfigError
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
        self._chat = chat
        self._tools: Any = [dict(tool) for tool in tools] or None
        self._takes_tool_role = True
        if chat and has_tools:
            try:
                self._rendered([{"role": "tool", "name": "probe", "content": "1"}])
            except ConfigError:
                self._takes_tool_role = False
        if chat:
            self._rendered([{"role": "user", "content": "1"}])

    def after(self, last_token: int, observation: str | Sequence[Message]) -> list[int]:
        """Return the tokens that follow a turn.

        Args:
            last_token: Id of the turn's last token. A chat template's text begins with the token that ends a message,
                which is left out if the policy has sampled it already.
            observation: Text or messages.

        Raises:
            ConfigError: The chat template cannot render the messages.
        """
        text = observation if isinstance(observation, str) else None
        messages = [{"role": "user", "content": text}] if text is not None else [dict(each) for each in observation]  # type: ignore[arg-type]
        messages = [
            message | {"content": self._without_control_tokens(str(message["content"]))} for message in messages
        ]
        piece = self._rendered(messages) if self._chat else "\n".join(str(message["content"]) for message in messages)
        token_ids: list[int] = self._tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        return token_ids[1:] if self._chat and token_ids[:1] == [last_token] else token_ids

    def _without_control_tokens(self, text: str) -> str:
        """Return ``text`` with a space inside each of the tokenizer's special tokens."""
        for token in self._tokenizer.all_special_tokens:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _rendered(self, messages: Sequence[Message]) -> str:
        """Return the template's text between a turn and the next one, with ``messages`` in it."""
        if not self._takes_tool_role:
            messages = [_as_user(message) for message in messages]
        begin = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}]
        roles = ", ".join(str(message.get("role")) for message in messages)
        template = f"The chat template of model.policy.path {self._tokenizer.name_or_path!r}"
        try:
            text: Any = self._tokenizer.apply_chat_template(
                [*begin, *map(dict, messages)], tools=self._tools, add_generation_prompt=True, tokenize=False
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ConfigError(f"{template} refuses an observation of roles {roles} after a turn: {error}") from error
        _, found, piece = str(text).partition(TURN)
        if not found or TURN in piece:
            raise ConfigError(f"{template} leaves out or repeats what the assistant said before roles {roles}.")
        return piece


def _as_user(message: Message) -> Message:
    if message["role"] != "tool":
        return message
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
