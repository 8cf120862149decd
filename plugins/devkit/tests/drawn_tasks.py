"""Environments and sources of a draw that the kits did not know, one mistake each."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from simple_environments import Guess
from simple_sources import Rows

from rlplug.data.prompt_stream import PromptStream
from rlplug.data.sources import AllRows
from rlplug.interfaces import StepResult


class LooksUpWhatToolsLoaded(Guess):
    """A run asks one object for its tools, and plays in others."""

    index: Mapping[str, str] = {}

    def tools(self) -> Sequence[Mapping[str, Any]]:
        self.index = {"m": "the thirteenth letter"}
        return ()

    def step(self, completion: str) -> Any:
        result = super().step(completion)
        return StepResult(f"{self.index.get(completion, 'nothing')}, {result.observation}", done=result.done)


class KeepsTheLoop(Guess):
    """An async step that waits for something with the whole event loop."""

    async def step(self, completion: str) -> Any:
        time.sleep(0.08)
        return super().step(completion)


class HashesSeedsOfText(Rows):
    """A mixture seeds its parts by texts, whose hash each process has of its own."""

    def for_training(self, key: str, name: str = "") -> AllRows:
        return RowsByHash(self, key, name)


class RowsByHash(AllRows):
    def prompts(self, encoder: Any, shuffle: bool, seed: int | str) -> PromptStream:
        prompts = encoder.usable("data.train", self.known)
        return PromptsByHash(prompts, shuffle, hash(seed) if isinstance(seed, str) else seed)


class PromptsByHash(PromptStream):
    def _epoch_order(self) -> list[int]:
        order = list(range(len(self)))
        if self._shuffle:
            random.Random(f"{self._seed}:{self.epoch}").shuffle(order)
        return order


CAUGHT_BY = {
    "environment": {
        "LooksUpWhatToolsLoaded": {"test_objects_that_were_not_asked_answer_alike"},
        "KeepsTheLoop": {"test_async_calls_let_others_run"},
    },
    "source": {"HashesSeedsOfText": {"test_a_seed_may_be_a_text"}},
}
"""For each kind: its mistakes, and the checks that find each."""
