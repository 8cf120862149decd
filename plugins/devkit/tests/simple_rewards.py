"""Rewards with one mistake each, the plain one first, which ``test_task_sabotage.py`` runs through their kit."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from rlplug_devkit import RewardConformance

from rlplug.interfaces import Reward
from rlplug.types import RewardError, Sample


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
