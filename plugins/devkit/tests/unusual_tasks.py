"""Correct rewards, environments and sources of unusual style, which the kits must not refuse."""

from __future__ import annotations

import asyncio
import functools
import operator
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import unusual_sources
from rlplug_devkit import make_prompt
from simple_environments import EnvironmentChecks, Guess
from simple_rewards import RewardChecks

from rlplug.interfaces import Environment, Reward, StepResult
from rlplug.rewards.function import FunctionReward
from rlplug.types import Prompt, RewardError, Sample

# ---- rewards ------------------------------------------------------------------------------------------------------


class Awaited(Reward):
    """Holds a lock of its event loop while it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.lock: asyncio.Lock | None = None

    async def score(self, samples: Sequence[Sample]) -> list[float | RewardError]:
        self.lock = self.lock or asyncio.Lock()
        async with self.lock:
            await asyncio.sleep(0.001)
        return [1.0 / (1 + len(sample.completion)) for sample in samples]


@dataclass(frozen=True)
class Frozen(Reward):
    weight: float = 0.5  # type: ignore[misc]
    name: str = "frozen"  # type: ignore[misc]
    deadline_s = 120.0

    def score(self, samples: Sequence[Sample]) -> Any:
        return tuple(np.float32(len(sample.completion)) for sample in samples)


class Yielding(Reward):
    """A generator of truth values, and of errors."""

    batch_size = 2

    def score(self, samples: Sequence[Sample]) -> Any:
        for sample in samples:
            answer = sample.prompt.answer
            yield RewardError("none") if answer is None else np.bool_(sample.completion == answer)


class OneAtATime(Reward):
    """Takes a single sample, as ``batch_size`` says, and loads in ``notes`` what cannot be pickled."""

    def notes(self):
        self.lock = threading.Lock()
        return []

    def score(self, samples):
        (sample,) = samples
        with self.lock:
            return [len(sample.completion)]


class Called:
    """As a function of an extension: called without ``self``, and without a signature in Python."""

    __slots__ = ()

    def __call__(self, samples: Any) -> Any:
        return map(operator.attrgetter("num_response_tokens"), samples)


class OfAnExtension(Reward):
    score = Called()  # type: ignore[assignment]


class Caching(Reward):
    """Keeps what it has scored, under all that it depends on, and writes a temporary file."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Any, float] = {}

    def score(self, samples: Sequence[Sample]) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "samples.txt").write_text(f"{len(samples)}")
        return [self.known.setdefault((repr(each.prompt.answer), each.completion), self.of(each)) for each in samples]

    def of(self, sample: Sample) -> float:
        return len(sample.completion) + float(sample.completion == sample.prompt.answer)


class TakesFromItsCopies(Reward):
    """Empties the list of its call, and writes into the samples there: both are its own."""

    def score(self, samples: Any) -> Any:
        values = []
        while samples:
            sample = samples.pop(0)
            sample.prompt.metadata["is_scored"] = True
            values.append(1.0 / (1 + len(sample.completion)))
        return values


def ends_with(places, completion, answer=None):
    return completion[-places:] == answer


class AwaitedChecks(RewardChecks):
    reward = Awaited


class FrozenChecks(RewardChecks):
    reward = Frozen


class YieldingChecks(RewardChecks):
    reward = Yielding


class OneAtATimeChecks(RewardChecks):
    reward = OneAtATime


class OfAnExtensionChecks(RewardChecks):
    reward = OfAnExtension


class CachingChecks(RewardChecks):
    reward = Caching


class TakesFromItsCopiesChecks(RewardChecks):
    reward = TakesFromItsCopies


class PartialChecks(RewardChecks):
    def make_reward(self) -> Reward:
        return FunctionReward(functools.partial(ends_with, 1))


# ---- environments -------------------------------------------------------------------------------------------------


class AwaitedGuess(Environment):
    """Its lock belongs to an event loop, the same one from ``reset`` on."""

    async def reset(self, prompt: Prompt, seed: int) -> None:
        self.answer, self.lock = prompt.answer, asyncio.Lock()
        await self.lock.acquire()

    async def step(self, completion: str) -> StepResult:
        self.lock.release()
        await asyncio.gather(self.lock.acquire(), asyncio.sleep(0.001))
        return StepResult("later" if completion[:1] < self.answer else "earlier", done=completion == self.answer)


@dataclass(frozen=True)
class FrozenGuess(Environment):
    cost: float = 0.1
    state: dict[str, Any] = field(default_factory=dict)

    def reset(self, prompt: Prompt, seed: int) -> None:
        self.state["answer"] = prompt.answer

    def step(self, completion: str) -> StepResult:
        answer = self.state["answer"]
        return StepResult("later" if completion[:1] < answer else "earlier", -self.cost, completion == answer)


class GeneratedGuess(Environment):
    """A generator has the state; ``step`` is its ``send``, which no Python function wraps."""

    def reset(self, prompt: Prompt, seed: int) -> None:
        self.game = self.play(prompt)
        next(self.game)
        self.step = self.game.send  # type: ignore[method-assign]

    def play(self, prompt: Prompt) -> Any:
        told: Any = None
        while True:
            turn = yield told
            told = StepResult("later" if turn[:1] < prompt.answer else "earlier", done=turn == prompt.answer)

    def step(self, completion: str) -> StepResult:
        raise NotImplementedError


class UntypedGuess(Environment):
    """Messages in a tuple, numbers of NumPy, and metrics that differ each time."""

    def reset(self, prompt, seed):
        self.answer = prompt.answer

    def step(self, completion):
        told = {"role": "user", "content": "later" if completion[:1] < self.answer else "earlier"}
        done = np.bool_(completion == self.answer)
        return StepResult((told,), np.float32(0.5), done, {"clock": time.perf_counter()})


TASKS: Final[dict[str, str]] = {}


class SharedTasks(Environment):
    """Keeps tasks for all objects of the process, by their uid, and ends a thread in ``close``."""

    thread: threading.Thread | None = None

    def reset(self, prompt: Prompt, seed: int) -> None:
        self.answer, self.ends = TASKS.setdefault(prompt.uid, prompt.answer), threading.Event()
        self.thread = threading.Thread(target=self.ends.wait)
        self.thread.start()

    def step(self, completion: str) -> StepResult:
        return StepResult("later" if completion[:1] < self.answer else "earlier", done=completion == self.answer)

    def close(self) -> None:
        if self.thread is not None:
            self.ends.set()
            self.thread.join()


class LuckyGuess(Guess):
    """Draws by the seed that ``reset`` gets, and uses up 63 bits of it."""

    def step(self, completion: str) -> Any:
        told = super().step(completion)
        return StepResult(f"{told.observation}, or {self.random.random():.3f}", done=told.done)


class AwaitedGuessChecks(EnvironmentChecks):
    environment = AwaitedGuess


class FrozenGuessChecks(EnvironmentChecks):
    environment = FrozenGuess


class GeneratedGuessChecks(EnvironmentChecks):
    environment = GeneratedGuess


class UntypedGuessChecks(EnvironmentChecks):
    environment = UntypedGuess


class SharedTasksChecks(EnvironmentChecks):
    environment = SharedTasks

    def prompts(self) -> Sequence[Prompt]:
        return [make_prompt("a>", answer="c"), make_prompt("a>", answer="y")]


class LuckyGuessChecks(EnvironmentChecks):
    environment = LuckyGuess


class TidyGuess(Guess):
    """Releases what it holds when its call is cancelled, and answers that it was."""

    async def step(self, completion: str) -> Any:
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            return StepResult("cancelled")
        return super().step(completion)


class TidyGuessChecks(EnvironmentChecks):
    environment = TidyGuess


CHECKS: Final = {
    name.removesuffix("Checks"): checks
    for name, checks in (globals() | vars(unusual_sources)).items()
    if name.endswith("Checks")
    and name not in {"EnvironmentChecks", "RewardChecks", "SourceChecks"}
    and name != "UnusualSourceChecks"
}
"""Kits on correct parts, by the part's name."""
