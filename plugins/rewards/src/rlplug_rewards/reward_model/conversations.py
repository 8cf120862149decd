"""Samples as conversations of a reward model: its own chat template and its own tokenizer."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any, Final

from rlplug_sandbox.chat_templates import bound
from rlplug_sandbox.tokenizer_files import require_bounded
from transformers import AutoTokenizer

from rlplug.errors import ConfigError, describe
from rlplug.models.hf_files import pretrained
from rlplug.types import RewardError, Sample

ALL: Final = 1 << 40
"""A number of samples or tokens without a limit."""


class Conversations:
    """Reader of samples as a reward model reads them.

    Args:
        owner: Name of the reward's class, for messages.
        path: Folder of the tokenizer, or name on the hub.
        chat_template: File with a chat template, in place of the tokenizer's; ``None`` for the tokenizer's.
        prompt_key: Field of the row with the question as text or as a list of messages; ``None`` for the prompt's own
            text or messages, without the policy's template.

    Raises:
        ConfigError: The file cannot be read.
    """

    def __init__(self, owner: str, path: str, chat_template: str | None, prompt_key: str | None) -> None:
        self._owner, self._path, self._prompt_key = owner, path, prompt_key
        self._template: str | None = None
        if chat_template is not None:
            try:
                self._template = Path(chat_template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as problem:
                raise ConfigError(
                    f"{owner}.chat_template is {chat_template!r}, which cannot be read ({describe(problem)})."
                ) from None
        self._lock = threading.Lock()
        self._tokenizer: Any = None

    def load(self) -> Any:
        """Return the tokenizer, which is loaded once.

        Raises:
            ConfigError: It cannot be loaded, or has no chat template.
        """
        with self._lock:
            if self._tokenizer is None:
                try:
                    require_bounded(self._path)
                    tokenizer: Any = pretrained(AutoTokenizer.from_pretrained, self._path)
                except Exception as problem:  # noqa: BLE001 - files of wrong types raise anything
                    raise ConfigError(
                        f"{self._owner}.path is {self._path!r}, whose tokenizer cannot be read: {describe(problem)}."
                    ) from None
                if self._template is not None:
                    tokenizer.chat_template = self._template
                if tokenizer.chat_template is None:
                    raise ConfigError(
                        f"{self._owner}.path is {self._path!r}, whose tokenizer has no chat template: name a file with "
                        f"one in {self._owner}.chat_template."
                    )
                self._tokenizer = bound(tokenizer)
            return self._tokenizer

    def tokens_of_text(self, text: str) -> list[int]:
        """Return token ids of a text as it is, without special tokens around it."""
        ids: list[int] = self.load()(text, add_special_tokens=False)["input_ids"]
        return ids

    def tokens(self, sample: Sample, longest: int) -> list[int] | RewardError:
        """Return a sample's conversation as token ids, or why it has none that the model takes.

        Args:
            sample: Prompt and completion.
            longest: Most tokens that the model takes.
        """
        question: Any = list(sample.prompt.messages) or sample.prompt.text
        if self._prompt_key is not None:
            question = sample.prompt.metadata.get(self._prompt_key)
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        if not isinstance(messages, list):
            return RewardError(f"the row's {self._prompt_key!r} is neither a text nor a list of messages")
        messages = [*messages, {"role": "assistant", "content": sample.completion}]
        try:
            ids = self.tokens_of_text(self.load().apply_chat_template(messages, tokenize=False))
        except Exception as problem:  # noqa: BLE001 - a template may raise anything
            return RewardError(f"the reward model's chat template failed on this sample: {describe(problem)}")
        if not 0 < len(ids) <= longest:
            return RewardError(f"the conversation has {len(ids)} tokens; the reward model takes 1 to {longest}")
        return ids


def require_positive(owner: str, **values: float | None) -> None:
    """Raise a :class:`ConfigError` for the first of a reward's arguments that is neither positive nor ``None``."""
    for key, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{owner}.{key} is {value}: give a positive number.")
