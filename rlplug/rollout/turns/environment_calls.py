"""Concurrent calls of the environments of many trajectories, each with a deadline."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import random
import statistics
import threading
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from rlplug.errors import ConfigError, RLPlugError, brief, describe, encodable
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.environment import Environment
from rlplug.interfaces.plain_values import json_problem
from rlplug.rollout.config import TurnOptions
from rlplug.rollout.trajectory import Trajectory
from rlplug.rollout.turns.observation_tokens import ObservationTokens
from rlplug.rollout.turns.step_answer import StepAnswer, read_step
from rlplug.timeouts import Call, CallBatch, CallError, TimeoutExecutor, call_within
from rlplug.token_arrays import TokenIds
from rlplug.types import Prompt, RewardError

TOOLS_S: Final = 600.0
"""Longest time for an environment to be made and to name its tools, in seconds: it may import much."""


@dataclass(eq=False)
class LiveEnvironment:
    """Environment of one trajectory, from its first call until the trajectory ends."""

    environment: Environment | None = None
    """``None`` until it is made, which may end after the trajectory."""
    is_released: bool = False
    """Whether the trajectory has ended."""


class EnvironmentCalls:
    """Environments of the trajectories that are not finished, one each, and their pending steps.

    Args:
        make: Makes an environment.
        tokenizer: Decodes turns to the text that environments read.
        end_tokens: Ids of the tokens with which a turn may end; they are left out of the text.
        options: Deadline and concurrency.
        observations: Makes text of an environment's observation.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: Sequence[int],
        options: TurnOptions,
        observations: ObservationTokens,
    ) -> None:
        self._make = make
        self._tokenizer = tokenizer
        self._end_tokens = frozenset(end_tokens)
        self._runner = TimeoutExecutor(options.step_deadline_s, options.max_concurrency)
        self._observations = observations
        self._calls, self._closing = CallBatch(), CallBatch()
        self._pending: dict[int, Trajectory] = {}
        self._live: dict[str, LiveEnvironment] = {}
        """By the trajectory's key."""
        self._live_lock = threading.Lock()
        """Environments are made in threads of the calls."""
        self._metrics_lock = threading.Lock()
        """Metrics are read while a thread collects."""
        self._num_failures = 0
        self._values: dict[str, list[float]] = {}

    def submit(self, trajectories: Sequence[Trajectory], max_tokens: int) -> None:
        """Start to step each trajectory's environment with its newest turn.

        An environment that this process does not have yet is made, reset, and stepped through the former turns first.

        Args:
            trajectories: The trajectories.
            max_tokens: Most tokens of a trajectory after its prompt; an observation that cannot fit is not tokenised.
        """
        functions, reads = [], []
        for trajectory in trajectories:
            turns, live = trajectory.turns(), self._live.setdefault(trajectory.key, LiveEnvironment())
            texts = [self._text(turn) for turn in (turns if live.environment is None else turns[-1:])]
            functions.append(functools.partial(self._advance, live, trajectory, texts))
            longest = (max_tokens - trajectory.num_after_prompt) * self._observations.characters_per_token
            reads.append(functools.partial(read_step, to_text=self._observations.text, longest=longest))
        for trajectory, call in zip(trajectories, self._runner.add(self._calls, functions, reads), strict=True):
            self._pending[id(call)] = trajectory

    @property
    def num_pending(self) -> int:
        """Trajectories whose environment has not returned yet."""
        return len(self._pending)

    @property
    def pending_keys(self) -> set[str]:
        """Keys of those trajectories."""
        return {trajectory.key for trajectory in self._pending.values()}

    def collect(self, timeout_s: float) -> list[tuple[Trajectory, StepAnswer | RewardError]]:
        """Return the results that have arrived since the last call, waiting up to ``timeout_s`` for the first."""
        settled = self._runner.settled(self._calls, timeout_s) if self._pending else []
        known = [call for call in settled if id(call) in self._pending]  # the others are forgotten
        return [(trajectory := self._pending.pop(id(call)), self._result(trajectory, call)) for call in known]

    def release(self, trajectory: Trajectory) -> None:
        """Close the environment of a finished trajectory, without waiting for it."""
        if (live := self._live.pop(trajectory.key, None)) is not None:
            self._close([live])

    def forget(self, trajectories: Sequence[Trajectory]) -> None:
        """Close the environments of trajectories that nobody goes on with; what they still answer is left out."""
        for trajectory in trajectories:
            self.release(trajectory)
        gone = {id(trajectory) for trajectory in trajectories}
        self._pending = {call: owner for call, owner in self._pending.items() if id(owner) not in gone}

    def pop_metrics(self) -> dict[str, float]:
        """Return ``environment/...`` since the last call: means of the step metrics, and counts of failures."""
        self._note_closed(0.0)
        with self._metrics_lock:
            values, self._values = self._values, {}
            failures, self._num_failures = self._num_failures, 0
        metrics = {f"environment/{name}": statistics.fmean(each) for name, each in values.items()}
        counts = {"failures": failures, "timed_out_threads": self._runner.num_abandoned}
        return metrics | {f"environment/{name}": float(count) for name, count in counts.items()}

    def close(self) -> None:
        """Close all environments; one that hangs is left after its deadline."""
        live, self._live = self._live, {}
        self._calls.drop_waiting()
        self._close(list(live.values()))
        while self._closing.num_unsettled:
            self._note_closed(1.0)
        self._note_closed(0.0)

    def _close(self, released: Sequence[LiveEnvironment]) -> None:
        with self._live_lock:
            for live in released:
                live.is_released = True
            functions = [live.environment.close for live in released if live.environment is not None]
        self._runner.add(self._closing, functions, [lambda _: None] * len(functions))

    def _note_closed(self, timeout_s: float) -> None:
        for call in self._runner.settled(self._closing, timeout_s):
            if call.error:
                warnings.warn(f"The close of an environment failed: {call.error}", stacklevel=2)

    def _text(self, token_ids: TokenIds) -> str:
        ended = len(token_ids) > 0 and int(token_ids[-1]) in self._end_tokens
        turn = token_ids[:-1] if ended else token_ids
        text: Any = self._tokenizer.decode(turn.tolist(), skip_special_tokens=False)
        return str(text)

    def _result(self, trajectory: Trajectory, call: Call) -> StepAnswer | RewardError:
        metrics = {} if call.error else call.value.metrics
        with self._metrics_lock:
            self._num_failures += bool(call.error)
            for name, value in {**metrics, "seconds": call.seconds}.items():
                self._values.setdefault(name, []).append(value)
        if call.error:
            live = self._live.get(trajectory.key, LiveEnvironment())
            step = PluginCall(live.environment or "model.environment", "step")
            return RewardError(call.error if step.is_of_core else f"{step}: {call.error}", call.kind)
        answer: StepAnswer = call.value
        return answer

    def _advance(self, live: LiveEnvironment, trajectory: Trajectory, texts: Sequence[str]) -> Any:
        """Return the step result of the last of ``texts``, or an awaitable of it."""
        if live.environment is not None:
            return live.environment.step(texts[-1])
        environment = self._make()
        object.__setattr__(environment, "response_template", getattr(self._tokenizer, "response_template", None))
        with self._live_lock:
            live.environment, is_released = environment, live.is_released
        if is_released:  # nobody waits for this call any more
            return environment.close()
        seed = random.Random(f"{trajectory.key}/environment").getrandbits(63)
        calls = [functools.partial(environment.reset, _own_copy(trajectory.prompt), seed)]
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


def _own_copy(prompt: Prompt) -> Prompt:
    """Return a copy for one environment: what it changes there reaches no other sample of the group, and no reward."""
    own = {"answer": prompt.answer, "metadata": dict(prompt.metadata), "messages": list(prompt.messages)}
    return dataclasses.replace(prompt, **copy.deepcopy(own))


def ask_environment(make: Callable[[], Environment]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the schemas of an environment's tools, and its notes, of an object that is made for that and closed again.

    Raises:
        ConfigError: The environment cannot be made, its tools are no list of JSON objects, or its notes no texts.
    """

    def ask() -> Any:
        environment = make()
        try:
            return list(environment.tools()), list(environment.notes())
        finally:
            environment.close()

    try:
        tools, notes = call_within(TOOLS_S, ask)
    except RLPlugError:
        raise
    except CallError as problem:
        raise ConfigError(f"model.environment {problem} to start and name its tools.") from None
    except Exception as error:
        raise ConfigError(f"model.environment cannot name its tools: {describe(error, with_line=True)}") from error
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise ConfigError(f"model.environment has the tool {brief(tool)}: give a JSON schema, a dictionary.")
        if found := json_problem(tool):
            raise ConfigError(f"model.environment has the tool {brief(tool)}, which has {found}: give a JSON schema.")
    for note in notes:
        if not isinstance(note, str):
            raise ConfigError(f"model.environment has the note {brief(note)}: give a text.")
    return [dict(tool) for tool in tools], [encodable(note) for note in notes]
