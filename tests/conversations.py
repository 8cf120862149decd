"""Environments for tests of the loop; the tokenizer's characters are digits, ``+``, ``=`` and a space."""

from __future__ import annotations

import asyncio
import time

from rlplug.interfaces import Environment, StepResult


class Counting(Environment):
    """Answers turn after turn with the number of the turn, and gives 1 for each; ends after ``num_turns``."""

    def __init__(self, num_turns=5):
        self.num_turns = num_turns
        self.seen = []

    def reset(self, prompt, seed):
        self.seen.append((prompt.uid, seed))

    def step(self, completion):
        self.seen.append(completion)
        number = len(self.seen) - 1
        return StepResult(str(number), reward=1.0, done=number == self.num_turns, metrics={"number": number})


class AsyncCounting(Counting):
    async def step(self, completion):
        await asyncio.sleep(0)
        return super().step(completion)


class Raising(Counting):
    """Raises in the trajectories of prompt ``1``, in their second turn."""

    def step(self, completion):
        if self.seen[0][0] == "1" and len(self.seen) == 2:
            raise ValueError("the world ended")
        return super().step(completion)


class Hanging(Counting):
    def step(self, completion):
        if self.seen[0][0] == "1" and len(self.seen) == 2:
            time.sleep(3600)
        return super().step(completion)


class Wrong(Counting):
    def step(self, completion):
        result = super().step(completion)
        return {"1": "what?", "2": StepResult(reward=float("nan"))}.get(self.seen[0][0], result)
