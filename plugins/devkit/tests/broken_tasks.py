"""Rewards, environments and sources with one mistake each, which ``test_task_sabotage.py`` runs through their kits."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from rlplug_devkit import (
    DataSourceConformance,
    EnvironmentConformance,
    RewardConformance,
)

from rlplug.data.prompt_stream import PromptStream
from rlplug.data.sources import AllRows, PromptRow, PromptSource
from rlplug.errors import ConfigError
from rlplug.interfaces import Environment, Reward, StepResult
from rlplug.types import Prompt, RewardError, Sample

# ---- rewards ------------------------------------------------------------------------------------------------------


class Fine(Reward):
    """1 / length, or an error where there is no answer."""

    def score(self, samples: Sequence[Sample]) -> Any:
        return [self.score_one(sample) for sample in samples]

    def score_one(self, sample: Sample) -> Any:
        return RewardError("no answer") if sample.prompt.answer is None else 1.0 / (1 + len(sample.completion))


class NamedMean(Fine):
    def __init__(self) -> None:
        super().__init__(name="mean")


class NotesAText(Fine):
    def notes(self) -> Any:
        return "one note"


class TakesTooLong(Fine):
    def score(self, samples: Sequence[Sample]) -> Any:
        time.sleep(0.15)
        return super().score(samples)


class RaisesOnOrdinaryText(Fine):
    def score_one(self, sample: Sample) -> Any:
        if sample.completion == "2+2=4, so 4":
            raise KeyError("found")
        return super().score_one(sample)


class DropsTheLast(Fine):
    def score(self, samples: Sequence[Sample]) -> Any:
        return super().score(samples[:3])


class ReturnsTexts(Fine):
    def score_one(self, sample: Sample) -> Any:
        return "0.5" if sample.completion == "4" else super().score_one(sample)


class FailsAlways(Fine):
    def score_one(self, sample: Sample) -> Any:
        return RewardError("the judge is away")


class CountsItsCalls(Fine):
    calls = 0

    def score(self, samples: Sequence[Sample]) -> Any:
        self.calls += 1
        return [v if isinstance(v, RewardError) else self.calls + v for v in super().score(samples)]


class SortsItsBatch(Fine):
    def score(self, samples: Sequence[Sample]) -> Any:
        return sorted(super().score(samples))


class FavoursTheFirst(Fine):
    compares_group = True

    def score(self, samples: Sequence[Sample]) -> Any:
        return [index == 0 for index, _ in enumerate(samples)]


class CountsForEver(Fine):
    calls = 0

    def score(self, samples: Sequence[Sample]) -> Any:
        self.calls += 1
        return super().score(samples)

    def pop_counts(self) -> Any:
        return {"calls": self.calls}


class KeepsTheSampleInSelf(Fine):
    def score_one(self, sample: Sample) -> Any:
        self.sample = sample
        time.sleep(0.02)
        return super().score_one(self.sample)


class DrawsGlobally(Fine):
    def score(self, samples: Sequence[Sample]) -> Any:
        random.random()
        return super().score(samples)


class SplitsAtTheFirstCharacter(Fine):
    def score_one(self, sample: Sample) -> Any:
        if sample.completion.isspace():
            raise IndexError("list index out of range")
        return super().score_one(sample)


class NeedsAnAnswer(Fine):
    def score_one(self, sample: Sample) -> Any:
        return float(len(sample.prompt.answer)) / (1 + len(sample.completion))


class SetsTheUmaskOnce(Fine):
    """Only the first call of a process changes it."""

    def score(self, samples: Sequence[Sample]) -> Any:
        os.umask(0o027)
        return super().score(samples)


class WaitsShorterEverywhere(Fine):
    def score(self, samples: Sequence[Sample]) -> Any:
        socket.setdefaulttimeout(7.0)
        return super().score(samples)


class WritesWhereItStands(Fine):
    def score(self, samples: Sequence[Sample]) -> Any:
        Path(f"scores-{time.perf_counter_ns()}.txt").write_text("1")
        return super().score(samples)


class LosesItsOffset(Fine):
    """Options that a copy lacks, as those of a slot or a closure."""

    def __init__(self, offset: float = 0.5) -> None:
        super().__init__()
        self.offset = offset

    def __reduce__(self) -> Any:
        return type(self), (0.0,)

    def score_one(self, sample: Sample) -> Any:
        value = super().score_one(sample)
        return value if isinstance(value, RewardError) else value + self.offset


class FineAndScaled(Fine):
    """Values over the largest so far."""

    scales = True

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0

    def scale(self, samples: Sequence[Sample], gather_arrays: Any) -> Any:
        values = [0.0 if sample.errors else sample.rewards[self.name] for sample in samples]
        self.largest = max([self.largest, *gather_arrays(values)])
        return [value / (self.largest or 1.0) for value in values]

    def state_dict(self) -> Any:
        return {"largest": self.largest}

    def load_state_dict(self, state: Any) -> None:
        self.largest = state.get("largest", 0.0)


class ForgetsTheLargest(FineAndScaled):
    def state_dict(self) -> Any:
        return {}


class ScalesToNothing(FineAndScaled):
    """A single sample has no spread."""

    def scale(self, samples: Sequence[Sample], gather_arrays: Any) -> Any:
        found = super().scale(samples, gather_arrays)
        return [float("nan")] if len(found) == 1 else found


class RewardChecks(RewardConformance):
    deadline_s = 5.0
    reward: ClassVar[type[Reward]]

    def make_reward(self) -> Reward:
        return self.reward()


# ---- environments -------------------------------------------------------------------------------------------------


class Guess(Environment):
    """Says whether the answer comes later."""

    def reset(self, prompt: Prompt, seed: int) -> None:
        self.answer, self.turns, self.random = prompt.answer, 0, random.Random(seed)

    def step(self, completion: str) -> Any:
        self.turns += 1
        return StepResult("later" if completion[:1] < self.answer else "earlier", done=completion == self.answer)


class ToolsWithoutNames(Guess):
    def tools(self) -> Any:
        return ["search"]


class AnswersLate(Guess):
    def step(self, completion: str) -> Any:
        time.sleep(0.15)
        return super().step(completion)


class RaisesAtTheSecondTurn(Guess):
    def step(self, completion: str) -> Any:
        result = super().step(completion)
        if self.turns == 2:
            raise RuntimeError("no second turn")
        return result


class RewardsWithNaN(Guess):
    def step(self, completion: str) -> Any:
        result = super().step(completion)
        return StepResult(result.observation, reward=float("nan")) if self.turns == 2 else result


class ClosesWhatTheFirstStepOpened(Guess):
    files: Any = ()

    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        self.files = None

    def step(self, completion: str) -> Any:
        self.files = ["opened"]
        return super().step(completion)

    def close(self) -> None:
        for _ in self.files:
            pass


class DrawsUnseeded(Guess):
    """From a generator that nobody seeds."""

    own = random.Random()

    def step(self, completion: str) -> Any:
        super().step(completion)
        return StepResult(f"{self.own.random()}")


class KeepsTheAnswerInItsClass(Guess):
    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        type(self).shared = prompt.answer  # type: ignore[attr-defined]

    def step(self, completion: str) -> Any:
        time.sleep(0.02)
        self.answer = type(self).shared  # type: ignore[attr-defined]
        return super().step(completion)


class IgnoresThePrompt(Guess):
    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        self.answer = "n"


class SeedsTorch(Guess):
    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        torch.manual_seed(seed)


class NeedsAFirstCharacter(Guess):
    def step(self, completion: str) -> Any:
        _ = completion[0]
        return super().step(completion)


class RepeatsTheTurn(Guess):
    def step(self, completion: str) -> Any:
        told = super().step(completion)
        return StepResult(f"you said {completion}: {told.observation}", done=told.done)


class EnvironmentChecks(EnvironmentConformance):
    deadline_s = 5.0
    environment: ClassVar[type[Environment]]

    def make_environment(self) -> Environment:
        return self.environment()


# ---- sources ------------------------------------------------------------------------------------------------------


class Rows(PromptSource):
    """Ten rows, unless the path is wrong."""

    def __init__(self, path: str = "here") -> None:
        self.path = path

    def rows(self) -> Any:
        if self.path != "here":
            raise ConfigError(f"{self.path} is not there: give here.")
        for index in range(10):
            yield self.row(index)

    def row(self, index: int) -> Any:
        return PromptRow(f"rows:{index}", f"{index}>", str(index), {})


class Empty(Rows):
    def rows(self) -> Any:
        if self.path != "here":
            raise ConfigError("not there")
        yield from ()


class HalvesOfPairs(Rows):
    def row(self, index: int) -> Any:
        return PromptRow(f"rows:{index}", "a\ud800" if index == 4 else "b", None, {})


class MixesForms(Rows):
    def row(self, index: int) -> Any:
        return PromptRow(f"rows:{index}", [{"role": "user", "content": "a"}] if index == 4 else "b", None, {})


class EmptyPrompts(Rows):
    def row(self, index: int) -> Any:
        return PromptRow(f"rows:{index}", "", None, {})


class OneUid(Rows):
    def row(self, index: int) -> Any:
        return PromptRow("rows", f"{index}>", None, {})


class Shuffles(Rows):
    def rows(self) -> Iterator[Any]:
        found = list(super().rows())
        random.Random(time.perf_counter_ns()).shuffle(found)
        return iter(found)


class KeepsItsPlace(Rows):
    place = 0

    def rows(self) -> Any:
        list(super().rows())
        self.place = 0
        while self.place < 10:
            self.place += 1
            yield self.row(self.place - 1)


class ForgetsItsPlace(Rows):
    """A source whose training prompts begin anew, whatever place was saved."""

    def for_training(self, key: str, name: str = "") -> AllRows:
        return RowsWithoutPlace(self, key, name)


class RowsWithoutPlace(AllRows):
    def prompts(self, encoder: Any, shuffle: bool, seed: int | str) -> PromptStream:
        return PromptsWithoutPlace(encoder.usable("data.train", self.known), shuffle, seed)


class PromptsWithoutPlace(PromptStream):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({**state, "epoch": 0, "position": 0})


class ReturnsAList(Rows):
    def rows(self) -> Any:
        return list(super().rows())


class SeedsGlobally(Rows):
    def rows(self) -> Any:
        random.seed(0)
        return super().rows()


class RaisesKeyErrors(Rows):
    def rows(self) -> Any:
        if self.path != "here":
            raise KeyError(self.path)
        return super().rows()


class SourceChecks(DataSourceConformance):
    source: ClassVar[type[Rows]]

    def make_source(self) -> PromptSource:
        return self.source()

    def make_broken_source(self) -> PromptSource:
        return self.source("elsewhere")
