"""Reward of a trained reward model."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch
from transformers import AutoTokenizer

from rlplug.errors import ConfigError, describe
from rlplug.interfaces.reward import Reward
from rlplug.rewards.reward_model.classifier import Classifier, empty_classifier, read_config
from rlplug.types import GIB, RewardError, Sample

ALL: Final = 1 << 40


class RewardModel(Reward):
    """Reward that a trained reward model gives: a sequence classifier with one label, from a folder or the hub.

    It reads prompt and completion as a conversation of its own chat template, with its own tokenizer, and scores all
    samples of a rank in one call, in batches of a token budget. Each rank has a whole copy. On the trainer's device it
    waits in host memory between the phases. A score that is NaN or infinite is an error of its sample.

    Args:
        path: Folder, or name on the hub.
        device: Device such as ``cuda:1`` that has it alone; the trainer's device of each rank by default.
        dtype: Of weights and computation.
        max_tokens: Most tokens of a pass, padding included.
        max_length: Longest conversation in tokens; a longer one is an error of its sample. By default, the model's
            ``max_position_embeddings``.
        prompt_key: Field of the row with the question as text or as a list of messages; by default, the prompt's own
            text or messages, without the policy's template.
        chat_template: File with a chat template, in place of the tokenizer's.
        offload: Whether it leaves the trainer's device between phases; ``false`` keeps it there.
        deadline_s: Longest time for all samples of a step in seconds, at most ``model.limits.reward_deadline_s``. The
            samples that are left then are errors.
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics (``reward/<name>``); ``rewardmodel`` by default.
    """

    batch_size = ALL

    def __init__(
        self,
        path: str,
        device: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
        max_tokens: int = 16384,
        max_length: int | None = None,
        prompt_key: str | None = None,
        chat_template: str | None = None,
        offload: bool = True,
        deadline_s: float = 28.0,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        for key, value in (("max_tokens", max_tokens), ("max_length", max_length), ("deadline_s", deadline_s)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"RewardModel.{key} is {value}: give a positive number.")
        try:
            self._own_device = None if device is None else torch.device(device)
        except RuntimeError as problem:
            raise ConfigError(f"RewardModel.device is {device!r}: {describe(problem)}") from None
        self._template: str | None = None
        if chat_template is not None:
            try:
                self._template = Path(chat_template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as problem:
                raise ConfigError(
                    f"RewardModel.chat_template is {chat_template!r}, which cannot be read ({describe(problem)})."
                ) from None
        self.path, self.prompt_key, self.offload, self.deadline_s = path, prompt_key, offload, deadline_s
        self.max_tokens, self.max_length = max_tokens, max_length
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._device = torch.device("cpu")
        self._lock = threading.Lock()
        self._loaded: tuple[Classifier, Any, int] | None = None

    def place(self, device: torch.device) -> None:
        self._device = device

    def device_bytes(self) -> tuple[int, bool]:
        if self._own_device is not None:
            return 0, False
        count = sum(parameter.numel() for parameter in empty_classifier(self.path).parameters())
        return count * self._dtype.itemsize, not self.offload

    def notes(self) -> list[str]:
        self._load()
        device = self._own_device or self._device
        where = f"on {device}" + (", in host memory between phases" if self._is_offloaded else "")
        count = sum(parameter.numel() for parameter in empty_classifier(self.path).parameters())
        size = f"{count * self._dtype.itemsize / GIB:.2f} GiB in {str(self._dtype).removeprefix('torch.')}"
        return [f"{self.name}: {self.path}, {size} {where}; up to {self.max_tokens} tokens a pass"]

    def score(self, samples: Sequence[Sample]) -> list[float | RewardError]:
        ends_at = time.monotonic() + (self.deadline_s or 0)
        classifier, tokenizer, longest = self._load()
        rows = [self._tokens(sample, tokenizer, longest) for sample in samples]
        usable = [row for row in rows if not isinstance(row, RewardError)]
        found = iter(classifier.scores(usable, self.max_tokens, ends_at))
        return [row if isinstance(row, RewardError) else self._value(next(found)) for row in rows]

    @property
    def _is_offloaded(self) -> bool:
        return self.offload and self._own_device is None and self._device.type != "cpu"

    def _load(self) -> tuple[Classifier, Any, int]:
        """Return the model, its tokenizer, and the longest row that it takes.

        Raises:
            ConfigError: They cannot be loaded.
        """
        with self._lock:
            if self._loaded is None:
                config = read_config(self.path)
                try:
                    tokenizer = AutoTokenizer.from_pretrained(self.path)
                except (OSError, ValueError) as problem:
                    raise ConfigError(
                        f"RewardModel.path is {self.path!r}, whose tokenizer cannot be read: {describe(problem)}."
                    ) from None
                if self._template is not None:
                    tokenizer.chat_template = self._template
                if tokenizer.chat_template is None:
                    raise ConfigError(
                        f"RewardModel.path is {self.path!r}, whose tokenizer has no chat template: name a file with "
                        "one in RewardModel.chat_template."
                    )
                device = self._own_device or self._device
                classifier = Classifier(self.path, device, self._dtype, self._is_offloaded)
                longest = self.max_length or getattr(config.get_text_config(), "max_position_embeddings", None) or ALL
                self._loaded = classifier, tokenizer, longest
            return self._loaded

    def _tokens(self, sample: Sample, tokenizer: Any, longest: int) -> list[int] | RewardError:
        """Return a sample's conversation as token ids."""
        question: Any = list(sample.prompt.messages) or sample.prompt.text
        if self.prompt_key is not None:
            question = sample.prompt.metadata.get(self.prompt_key)
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        if not isinstance(messages, list):
            return RewardError(f"the row's {self.prompt_key!r} is neither a text nor a list of messages")
        messages = [*messages, {"role": "assistant", "content": sample.completion}]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as problem:  # noqa: BLE001 - a template may raise anything
            return RewardError(f"the reward model's chat template failed on this sample: {describe(problem)}")
        if not 0 < len(ids) <= longest:
            return RewardError(f"the conversation has {len(ids)} tokens; the reward model takes 1 to {longest}")
        return ids

    def _value(self, score: float | None) -> float | RewardError:
        if score is None:
            return RewardError(f"the reward model took longer than RewardModel.deadline_s {self.deadline_s:g} s")
        if not math.isfinite(score):
            return RewardError(f"the reward model's score is {score}")
        return score
