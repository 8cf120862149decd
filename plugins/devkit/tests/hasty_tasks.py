"""Rewards, environments and sources with what authors write in haste: on first use, at the end, of other kinds.

``test_task_sabotage.py`` runs them through their kits.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from simple_environments import Guess
from simple_rewards import Fine
from simple_sources import Rows

from rlplug.data.prompt_stream import PromptStream
from rlplug.data.sources import AllRows, PromptRow
from rlplug.interfaces import StepResult
from rlplug.types import Prompt, RewardError, Sample

# ---- rewards --------------------------------------------------------------------------------------------------------


class FillsATableOnFirstUse(Fine):
    """The first of two calls has begun to fill it when the second one reads it."""

    table: ClassVar[dict[int, float]] = {}

    def score_one(self, sample: Sample) -> Any:
        if not self.table:
            for length in range(30):
                self.table[length] = 1.0 / (1 + length)
                time.sleep(0.001)
        value = super().score_one(sample)
        return value if isinstance(value, RewardError) else self.table.get(len(sample.completion), 0.0)


class StripsItsAnswer(Fine):
    """Which a file may have as a number."""

    def score_one(self, sample: Sample) -> Any:
        value = super().score_one(sample)
        return value if isinstance(value, RewardError) else value + (sample.prompt.answer.strip() in sample.completion)


class KnowsOneEnd(Fine):
    def score_one(self, sample: Sample) -> Any:
        value = super().score_one(sample)
        return value if isinstance(value, RewardError) else value * {"stop": 1.0}[sample.finish_reason]


class KeepsEverySample(Fine):
    """To show some of them later."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Sample] = []

    def score(self, samples: Sequence[Sample]) -> Any:
        self.seen.extend(samples)
        return super().score(samples)


# ---- environments ---------------------------------------------------------------------------------------------------


class FillsAWorldOnFirstUse(Guess):
    world: ClassVar[dict[str, str]] = {}

    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        if not self.world:
            for number in range(26):
                self.world[chr(97 + number)] = chr(97 + number)
                time.sleep(0.001)
        self.answer = self.world.get(prompt.answer, "?")


class LeavesItsTranscript(Guess):
    """Open, once it is done."""

    def step(self, completion: str) -> Any:
        result = super().step(completion)
        if self.turns == 3:
            self.transcripts.append(open(os.devnull, "w"))  # noqa: SIM115
        return result

    transcripts: ClassVar[list[Any]] = []


class RegistersItself(Guess):
    every: ClassVar[list[Any]] = []

    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        self.every.append(self)


class SeedsByRank(Guess):
    def step(self, completion: str) -> Any:
        result = super().step(completion)
        hint = random.Random(self.turns + int(os.environ.get("RANK", "0"))).random()
        return StepResult(f"{result.observation} {hint}", done=result.done)


class RemembersByDefault(Guess):
    """In a list that is a default."""

    def reset(self, prompt: Prompt, seed: int, history: list[str] = []) -> None:  # noqa: B006
        super().reset(prompt, seed)
        self.history = history

    def step(self, completion: str) -> Any:
        self.history.append(completion)
        result = super().step(completion)
        return StepResult(f"{result.observation} after {len(self.history)}", done=result.done)


# ---- sources --------------------------------------------------------------------------------------------------------


class TakesItsShare(Rows):
    """Of the rows, by the rank: a run does that."""

    def rows(self) -> Any:
        rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "2")))
        for index, row in enumerate(super().rows()):
            if index % size == rank:
                yield row


class MixesFormsLate(Rows):
    def rows(self) -> Any:
        yield from super().rows()
        for index in range(10, 400):
            yield PromptRow(f"rows:{index}", [{"role": "user", "content": "a"}] if index == 300 else "b", None, {})


class LearnsFromFailures(Rows):
    """Reads the reward of a sample that has an error in its place."""

    def for_training(self, key: str, name: str = "") -> AllRows:
        return RowsThatLearn(self, key, name)


class RowsThatLearn(AllRows):
    def prompts(self, encoder: Any, shuffle: bool, seed: int | str) -> PromptStream:
        return PromptsThatLearn(encoder.usable(self._key, self.known), shuffle, seed)


class PromptsThatLearn(PromptStream):
    best = 0.0

    def observe(self, samples: Sequence[Sample], gather_arrays: Any) -> None:
        self.best = max([self.best, *(value for sample in samples for value in sample.rewards.values())])


class UnpacksForEachReader(Rows):
    def rows(self) -> Any:
        folder = Path(tempfile.mkdtemp(prefix="unpacked-"))
        (folder / "rows.txt").write_text("\n".join(map(str, range(10))))
        yield from super().rows()


CAUGHT_BY = {
    "reward": {
        "FillsATableOnFirstUse": {"test_first_calls_at_once_score_alike"},
        "StripsItsAnswer": {"test_answers_of_other_kinds_are_scored_or_refused"},
        "KnowsOneEnd": {"test_cut_samples_and_several_turns_are_scored"},
        "KeepsEverySample": {"test_calls_leave_nothing_behind"},
    },
    "environment": {
        "FillsAWorldOnFirstUse": {"test_first_trajectories_at_once_are_answered_alike"},
        "LeavesItsTranscript": {"test_trajectories_leave_nothing_behind"},
        "RegistersItself": {"test_trajectories_leave_nothing_behind"},
        "SeedsByRank": {"test_another_process_has_the_same_answers"},
        "RemembersByDefault": {"test_the_same_turns_have_the_same_answers"},
    },
    "source": {
        "TakesItsShare": {"test_another_process_reads_the_same_rows"},
        "MixesFormsLate": {"test_rows_for_training_are_known_by_their_part"},
        "LearnsFromFailures": {"test_observed_samples_go_on_too"},
        "UnpacksForEachReader": {"test_readers_leave_nothing_behind"},
    },
}
"""For each kind: its mistakes, and the checks that find each."""
