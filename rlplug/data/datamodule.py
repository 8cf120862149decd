"""``PromptDataModule``: renders and tokenises the prompts once, and gives them to the RL loop."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from rlplug.data.prompt_encoder import PromptEncoder, PromptRules
from rlplug.data.prompt_stream import TrainingPrompts
from rlplug.data.rows import PromptRow
from rlplug.data.sources import PromptSource, TrainingRows, read_rows
from rlplug.errors import ConfigError
from rlplug.types import Prompt
from rlplug.types.ranges import Seed, Tokens, check_ranges


class PromptDataModule(LightningDataModule):
    """Prompts of training and validation.

    With ``chat``, a prompt gets exactly the special tokens that the chat template writes, because templates write the
    BOS token themselves. Without, it gets those that the tokenizer puts in front of a text (Llama's and Gemma's BOS,
    nothing for Qwen and GPT-2), as base models were pre-trained. It never gets those that the tokenizer puts behind a
    text, such as T5's EOS, because the completion continues the prompt.

    Args:
        train: Source of the training prompts.
        val: Source of the validation prompts.
        chat: Render prompts with the tokenizer's chat template; plain text becomes one user message. By default, this
            is done when the rows are messages.
        system_prompt: System message in front of every prompt; only with ``chat``.
        continue_final_message: Have the policy continue a prompt's last message where it is the assistant's; by default
            such a prompt is refused. What it continues is no part of the completion.
        max_prompt_tokens: Longest prompt, in tokens. Prompt and completion must also fit the policy's context, and the
            engine's.
        too_long: ``refuse`` stops when a prompt is longer; ``filter`` leaves such prompts out and says how many.
        shuffle: Draw a new order of the training prompts for each epoch.
        seed: Seed of these orders; 0 follows ``seed_everything``.
    """

    def __init__(
        self,
        train: PromptSource,
        val: PromptSource | None = None,
        chat: bool | None = None,
        system_prompt: str | None = None,
        max_prompt_tokens: Tokens | None = None,
        too_long: Literal["filter", "refuse"] = "refuse",
        shuffle: bool = True,
        seed: Seed = 0,
        continue_final_message: bool = False,
    ) -> None:
        super().__init__()
        if system_prompt is not None and chat is False:
            raise ConfigError("data.system_prompt needs a chat template, and data.chat is false: drop one of them.")
        self.train, self.val = train, val
        self.chat, self.system_prompt, self.continue_final_message = chat, system_prompt, continue_final_message
        self.max_prompt_tokens, self.too_long = max_prompt_tokens, too_long
        self.shuffle, self.seed = shuffle, seed
        check_ranges(self, "data")
        self.val_prompts: list[Prompt] = []
        self.counts: dict[str, dict[str, int]] = {}
        """Numbers of prompts that were ``read``, left out as ``too_long``, and ``kept``.

        By ``train`` and ``val``, and by ``train/<source>`` of a mixture.
        """
        self.renders_chat = False
        """Whether prompts are rendered with the chat template; set by ``setup``."""
        self.template_tools: Sequence[Mapping[str, Any]] = ()
        """JSON schemas of the environment's tools when the chat template presents them, else empty."""
        self._stage: str | None = None
        self._train_stream: TrainingPrompts | None = None
        self._early_state: Mapping[str, Any] = {}

    @property
    def val_sources(self) -> Sequence[str]:
        """Names of the sources of ``val``, when it is a mixture."""
        return tuple(dict.fromkeys(prompt.source for prompt in self.val_prompts if prompt.source))

    @property
    def train_stream(self) -> TrainingPrompts:
        """The stream that the RL loop takes its prompts from; there after ``setup("fit")``."""
        assert self._train_stream is not None, "there are training prompts after setup('fit')"
        return self._train_stream

    @property
    def longest_prompt(self) -> int:
        """Length of the longest prompt of ``train`` and ``val``, in tokens; what streams counts with its limit."""
        of_train = 0 if self._train_stream is None else self._train_stream.longest_prompt
        return max([of_train, *(len(prompt.token_ids) for prompt in self.val_prompts)])

    def setup(self, stage: str) -> None:
        """Load the prompts of ``stage`` by the rules of the trainer's module, before that module's own ``setup``."""
        assert self.trainer is not None
        module: Any = self.trainer.lightning_module
        self.load(stage, module.prompt_rules)

    def load(self, stage: str, rules: PromptRules) -> None:
        """Read, render and tokenise the prompts that ``stage`` needs: all for fit, those of ``val`` for validate.

        Raises:
            ConfigError: The prompts cannot be used as configured; the message names the key and the fix.
        """
        if self.val is None and stage == "validate":
            raise ConfigError("data.val is not set, and validate needs prompts: set it to a source, as in data.train.")
        trained = None
        if stage == "fit":
            trained = self.train.for_training("data.train")
            _check_returned(self.train, "for_training", trained, TrainingRows)
        known = [] if trained is None else trained.known
        val = [] if self.val is None else read_rows("data.val", self.val)
        all_rows = [*known, *val]
        options = self.chat, self.system_prompt, self.max_prompt_tokens, self.too_long, self.continue_final_message
        encoder = PromptEncoder(rules, all_rows, *options)
        self.renders_chat, self.template_tools = encoder.renders_chat, encoder.template_tools
        self.val_prompts = encoder.usable("data.val", val) if val else []
        if trained is not None:
            self._train_stream = trained.prompts(encoder, self.shuffle, self.seed)
            _check_returned(trained, "prompts", self._train_stream, TrainingPrompts)
            prompts = [*self._train_stream.by_uid.values()]
            self._count("train", known, prompts)
            _warn_of_overlap(prompts, self.val_prompts)
            if self._early_state:
                self._train_stream.load_state_dict(self._early_state)
        self._count("val", val, self.val_prompts)
        self._stage, self._early_state = stage, {}

    def _count(self, split: str, rows: Sequence[PromptRow], prompts: Sequence[Prompt]) -> None:
        """Count the rows and the prompts of each source; a streamed one has no prompts yet and is left out."""
        kept = Counter(prompt.source for prompt in prompts)
        read = Counter(row.source for row in rows if row.source in kept)
        for source in ["", *filter(None, kept)] if kept else []:
            num_read, num_kept = (counts[source] if source else counts.total() for counts in (read, kept))
            counts = {"read": num_read, "too_long": num_read - num_kept, "kept": num_kept}
            self.counts[f"{split}/{source}" if source else split] = counts

    def train_dataloader(self) -> Ticks:
        """Return endless ticks: the RL loop takes its prompts from ``train_stream`` and stops by itself."""
        return Ticks(None)

    def val_dataloader(self) -> Ticks | list[Any]:
        """Return one tick, for which ``validation_step`` runs all of ``val_prompts``; return no tick during fit.

        During fit, the RL loop validates by itself, because Lightning counts batches and not RL steps.
        """
        if self._stage != "fit":
            return Ticks(1)
        # Lightning warns of a loader without batches, which is intended here
        warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training prompts, or an empty state when there are none, as in validate."""
        return {} if self._train_stream is None else self._train_stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved position in the training prompts, at once or as soon as ``setup`` has read them.

        Lightning calls this after ``setup``, in validate too, where there are no training prompts to resume.

        Raises:
            ConfigError: The position was saved for other prompts or another order.
        """
        if self._train_stream is not None:
            self._train_stream.load_state_dict(state_dict)
        elif self._stage is None:
            self._early_state = state_dict


class Ticks:
    """Iterable without a length that gives Lightning meaningless numbers instead of batches.

    They are tensors because Lightning reads a batch size from each batch when something is logged per epoch.

    Args:
        num_ticks: Number of ticks; ``None`` for no end.
    """

    def __init__(self, num_ticks: int | None) -> None:
        self.num_ticks = num_ticks

    def __iter__(self) -> Iterator[Tensor]:
        return map(torch.tensor, itertools.count() if self.num_ticks is None else range(self.num_ticks))


def _check_returned(owner: object, method: str, found: object, kind: type[Any]) -> None:
    """Refuse what a method of ``data.train`` has returned, if it is not of the kind that the method says."""
    if not isinstance(found, kind):
        wrong = type(found).__name__
        raise ConfigError(f"data.train: {type(owner).__name__}.{method} returned {wrong}: return {kind.__name__}.")


def _warn_of_overlap(train: Sequence[Prompt], val: Sequence[Prompt]) -> None:
    trained_on = {prompt.token_ids for prompt in train}
    num_shared = sum(prompt.token_ids in trained_on for prompt in val)
    if num_shared:
        rank_zero_warn(f"data.val: {num_shared} of {len(val)} prompts are also in data.train, and will be trained on.")
