"""Concurrent calls of the environments of many trajectories, each with a deadline."""

from __future__ import annotations

import functools
import inspect
import math
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlplug.interfaces.environment import Environment, StepResult
from rlplug.rollout.config import TurnOptions
from rlplug.rollout.trajectory import Trajectory
from rlplug.timeouts import Call, CallBatch, TimeoutExecutor


@dataclass(frozen=True)
class Failure:
    """The result of an environment's step that raised, timed out or returned something invalid."""

    message: str
    """What went wrong, at most 500 characters."""


class EnvironmentCalls:
    """Environments of the trajectories that are not finished, one each, and their pending steps.

    Args:
        make: Makes an environment.
        tokenizer: Decodes turns to the text that environments read.
        end_tokens: Ids of the tokens with which a turn may end; they are left out of the text.
        options: Deadline and concurrency.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: Sequence[int],
        options: TurnOptions,
    ) -> None:
        self._make = make
        self._tokenizer = tokenizer
        self._end_tokens = frozenset(end_tokens)
        self._runner = TimeoutExecutor(options.step_deadline_s, options.max_concurrency)
        self._calls = CallBatch()
        self._pending: dict[int, Trajectory] = {}
        self._live: dict[str, Environment] = {}
        self._num_failures = 0
        self._values: dict[str, list[float]] = {}

    def submit(self, trajectories: Sequence[Trajectory]) -> None:
        """Start to step each trajectory's environment with its newest turn.

        An environment that this process does not have yet is made, reset, and stepped through the former turns first.
        """
        functions = []
        for trajectory in trajectories:
            turns = trajectory.turns()
            texts = [self._text(turn) for turn in (turns[-1:] if trajectory.key in self._live else turns)]
            functions.append(functools.partial(self._advance, trajectory, texts))
        for trajectory, call in zip(trajectories, self._runner.add(self._calls, functions), strict=True):
            self._pending[id(call)] = trajectory

    @property
    def num_pending(self) -> int:
        """Trajectories whose environment has not returned yet."""
        return len(self._pending)

    def collect(self, timeout_s: float) -> list[tuple[Trajectory, StepResult | Failure]]:
        """Return the results that have arrived since the last call, waiting up to ``timeout_s`` for the first."""
        settled = self._runner.settled(self._calls, timeout_s) if self._pending else []
        return [(self._pending.pop(id(call)), self._result(call)) for call in settled]

    def release(self, trajectory: Trajectory) -> None:
        """Close the environment of a finished trajectory."""
        environment = self._live.pop(trajectory.key, None)
        if environment is not None:
            environment.close()

    def pop_metrics(self) -> dict[str, float]:
        """Return ``environment/...`` since the last call: means of the step metrics, and counts of failures."""
        values, self._values = self._values, {}
        failures, self._num_failures = self._num_failures, 0
        metrics = {f"environment/{name}": statistics.fmean(each) for name, each in values.items()}
        counts = {"failures": failures, "abandoned_threads": self._runner.num_abandoned}
        return metrics | {f"environment/{name}": float(count) for name, count in counts.items()}

    def close(self) -> None:
        """Close all environments."""
        live, self._live = self._live, {}
        for environment in live.values():
            environment.close()
        self._calls.drop_waiting()

    def _text(self, token_ids: list[int]) -> str:
        ended = bool(token_ids) and token_ids[-1] in self._end_tokens
        text: Any = self._tokenizer.decode(token_ids[:-1] if ended else token_ids, skip_special_tokens=False)
        return str(text)

    def _result(self, call: Call) -> StepResult | Failure:
        self._values.setdefault("seconds", []).append(call.seconds)
        problem = "" if call.error is None else f"{type(call.error).__name__}: {call.error}"
        if call.error is None and not isinstance(call.value, StepResult):
            problem = f"step returned {call.value!r} and not a StepResult"
        elif call.error is None and not math.isfinite(call.value.reward):
            problem = f"step returned the reward {call.value.reward}"
        if problem:
            self._num_failures += 1
            return Failure(problem[:500])
        result: StepResult = call.value
        for name, value in result.metrics.items():
            self._values.setdefault(name, []).append(float(value))
        return result

    def _advance(self, trajectory: Trajectory, texts: Sequence[str]) -> Any:
        """Return the step result of the last of ``texts``, or an awaitable of it."""
        environment = self._live.get(trajectory.key)
        if environment is not None:
            return environment.step(texts[-1])
        environment = self._live[trajectory.key] = self._make()
        seed = random.Random(f"{trajectory.key}/environment").getrandbits(63)
        calls = [functools.partial(environment.reset, trajectory.prompt, seed)]
        return _in_order([*calls, *(functools.partial(environment.step, text) for text in texts)])


def _in_order(calls: Sequence[Callable[[], Any]]) -> Any:
    """Make calls one after another and return the last result; once one is awaitable, return an awaitable of it."""
    result = None
    for index, call in enumerate(calls, start=1):
        result = call()
        if inspect.isawaitable(result):
            return _await_in_order(result, calls[index:])
    return result


async def _await_in_order(first: Awaitable[Any], calls: Sequence[Callable[[], Any]]) -> Any:
    result = await first
    for call in calls:
        result = call()
        if inspect.isawaitable(result):
            result = await result
    return result
