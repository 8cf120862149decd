"""Reward of a trained reward model."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Literal

import torch

from rlplug.errors import ConfigError, describe
from rlplug.interfaces.reward import Reward
from rlplug.types import GIB, RewardError, Sample
from rlplug_rewards.reward_model.classifier import Classifier, empty_classifier, read_config
from rlplug_rewards.reward_model.conversations import ALL, Conversations, require_positive


class RewardModel(Reward):
    """Reward that a trained reward model gives: a sequence classifier with one label, from a folder or the hub.

    It reads prompt and completion as a conversation of its own chat template, with its own tokenizer, and scores all
    samples of a rank in one call, in batches of a token budget. Each rank has a whole copy. On the trainer's device it
    waits in host memory between the phases. A score that is NaN or infinite is an error of its sample.

    Args:
        path: Folder, or name on the hub.
        device: Device such as ``cuda:1`` that has it alone; the trainer's device of each rank by default.
        dtype: Dtype of weights and computation.
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
        require_positive("RewardModel", max_tokens=max_tokens, max_length=max_length, deadline_s=deadline_s)
        try:
            self._own_device = None if device is None else torch.device(device)
        except RuntimeError as problem:
            raise ConfigError(f"RewardModel.device is {device!r}: {describe(problem)}") from None
        self._conversations = Conversations("RewardModel", path, chat_template, prompt_key)
        self.path, self.offload, self.deadline_s = path, offload, deadline_s
        self.max_tokens, self.max_length = max_tokens, max_length
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._device = torch.device("cpu")
        self._lock = threading.Lock()
        self._loaded: tuple[Classifier, int] | None = None

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
        classifier, longest = self._load()
        rows = [self._conversations.tokens(sample, longest) for sample in samples]
        usable = [row for row in rows if not isinstance(row, RewardError)]
        found = iter(classifier.scores(usable, self.max_tokens, ends_at))
        return [row if isinstance(row, RewardError) else self._value(next(found)) for row in rows]

    @property
    def _is_offloaded(self) -> bool:
        return self.offload and self._own_device is None and self._device.type != "cpu"

    def _load(self) -> tuple[Classifier, int]:
        """Return the model, and the longest row that it takes.

        Raises:
            ConfigError: They cannot be loaded.
        """
        with self._lock:
            if self._loaded is None:
                config = read_config(self.path)
                self._conversations.load()
                device = self._own_device or self._device
                classifier = Classifier(self.path, device, self._dtype, self._is_offloaded)
                longest = self.max_length or getattr(config.get_text_config(), "max_position_embeddings", None) or ALL
                self._loaded = classifier, longest
            return self._loaded

    def _value(self, score: float | None) -> float | RewardError:
        if score is None:
            late = f"the reward model took longer than RewardModel.deadline_s {self.deadline_s:g} s"
            return RewardError(late, "late")
        if not math.isfinite(score):
            return RewardError(f"the reward model's score is {score}", "invalid")
        return score
