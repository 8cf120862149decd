"""Environments with one mistake each, the plain one first, which ``test_task_sabotage.py`` runs through their kit."""

from __future__ import annotations

import random
import time
from typing import Any, ClassVar

import torch
from rlplug_devkit import EnvironmentConformance

from rlplug.interfaces import Environment, StepResult
from rlplug.types import Prompt


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


class CutsBytes(Guess):
    def step(self, completion: str) -> Any:
        _ = completion.encode()[:24].decode()
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
