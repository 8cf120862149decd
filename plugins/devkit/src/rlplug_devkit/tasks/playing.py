"""Trajectories of an environment, played as a run plays them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from rlplug.interfaces.environment import Environment, Message
from rlplug.rollout.turns.environment_calls import ask_environment
from rlplug.rollout.turns.step_answer import StepAnswer, read_step
from rlplug.timeouts import CallError
from rlplug.types import Prompt
from rlplug_devkit.tasks.refusals import RefusalChecks

SEED: Final = 0x5EED_0123_4567_89AB
"""A run's seeds have 63 bits."""


def make_prompt(text: str = "a>", answer: Any = None, **metadata: Any) -> Prompt:
    """Return a prompt with a token for each character, and the other fields of its task."""
    uid = f"made-up:{zlib.crc32(repr((text, answer, metadata)).encode('utf-8', 'replace'))}"
    return Prompt(uid, tuple(ord(character) % 1000 for character in text), text, answer, metadata)


@dataclass(frozen=True)
class Played:
    """What an environment answered to some turns, until it was done or a call failed."""

    answers: tuple[StepAnswer, ...] = ()
    error: str = ""
    """Name of the first call that failed before ``close``, and how."""
    malformed: str = ""
    """What is wrong with an answer."""
    close_error: str = ""
    """How ``close`` failed."""

    @property
    def problem(self) -> str:
        """What went wrong first; empty if nothing did."""
        return self.error or self.malformed or self.close_error

    @property
    def told(self) -> list[tuple[Any, float, bool]]:
        """What the policy and its training get: observation, reward, and whether it is done, of each turn."""
        return [(answer.text, answer.reward, answer.done) for answer in self.answers]


class Plays(RefusalChecks):
    """Base class of the kit: plays turns in an environment.

    Attributes:
        max_observation_chars: Longest observation in characters, whatever the policy writes: a longer one would end
            trajectories.
    """

    max_observation_chars: ClassVar[int] = 100_000
    _seed = SEED
    _clears = False
    """Whether what a step returned is emptied when it was read: it is the caller's."""
    _pause_s = 0.0
    """Time that the policy takes before each turn, in seconds."""

    def make_environment(self) -> Environment:
        """Return an environment, as a YAML file would make it for one trajectory."""
        raise NotImplementedError(f"{type(self).__name__}.make_environment must return the environment to test")

    def prompts(self) -> Sequence[Prompt]:
        """Return at least two prompts of tasks with different answers; see :func:`make_prompt`."""
        return [make_prompt("a>", answer="c"), make_prompt("b>", answer="y")]

    def turns(self) -> Sequence[str]:
        """Return what the policy says in turn, in a trajectory of some turns."""
        return ["m", "x", "c"]

    def endless_turn(self) -> str | None:
        """Return a turn whose answer takes longer than ``deadline_s`` unless ``close`` ends it; ``None`` for none."""
        return None

    def expected(self) -> Sequence[Sequence[tuple[str, float, bool]]] | None:
        """Return observation, reward and ``done`` of each turn, for each prompt; without them, any that differ will do.

        A list of messages is given as its ``str``; the observation is empty where a trajectory is done.
        """
        return None

    def expected_metrics(self) -> Sequence[Sequence[Mapping[str, float]]] | None:
        """Return the metrics of each turn, for each prompt; without them, any will do."""
        return None

    def expected_tools(self) -> tuple[Sequence[Mapping[str, Any]], Sequence[str]] | None:
        """Return the tools and the notes; without them, any will do."""
        return None

    def _subject(self) -> str:
        return type(self.make_environment()).__name__

    def _make(self) -> Environment:
        return self.make_environment()

    def _prepare(self, made: Any) -> None:
        ask_environment(lambda: made)

    def _play(self, prompt: Prompt, turns: Sequence[str], environment: Environment | None = None) -> Played:
        """Play turns in an environment and close it; each call gets its deadline, as in a run."""
        with self._guard().around("a trajectory"):
            return self._trajectory(prompt, turns, environment)

    def _trajectory(self, prompt: Prompt, turns: Sequence[str], environment: Environment | None = None) -> Played:
        error = ""
        if environment is None:
            environment, error = self._call("the constructor", self.make_environment)
        if environment is None:
            return Played(error=error or "make_environment returned nothing")
        self._watch(environment)
        answers, malformed = [], ""
        error = self._reset(environment, prompt)
        for turn in turns if not error else ():
            time.sleep(self._pause_s)
            answer, error, malformed = self._step(environment, turn)
            if answer is None:
                break
            answers.append(answer)
            if answer.done:
                break
        return Played(tuple(answers), error, malformed, self._close(environment))

    def _reset(self, environment: Environment, prompt: Prompt) -> str:
        """Begin a trajectory as a run does, and return what went wrong."""
        object.__setattr__(environment, "response_template", None)
        own = {"answer": prompt.answer, "metadata": dict(prompt.metadata), "messages": list(prompt.messages)}
        given = dataclasses.replace(prompt, **copy.deepcopy(own))
        return self._call("reset", functools.partial(environment.reset, given, self._seed))[1]

    def _step(self, environment: Environment, turn: str) -> tuple[StepAnswer | None, str, str]:
        """Return the answer to a turn, or how the call failed, or what is wrong with what it returned."""
        result, error = self._call("step", functools.partial(environment.step, turn))
        if error:
            return None, error, ""
        try:
            answer = read_step(result, functools.partial(_text_after, turn), self.max_observation_chars)
        except CallError as problem:
            return None, "", str(problem)
        for part in (result.observation, result.metrics) if self._clears else ():
            if isinstance(part, list | dict):
                part.clear()
        return answer, "", ""

    def _close(self, environment: Environment) -> str:
        return self._call("close", environment.close)[1]

    def _call(self, name: str, function: Callable[[], Any]) -> tuple[Any, str]:
        (call,) = self._calls([function], read=lambda returned: returned)
        verb = "" if "took longer" in call.error else "raised "
        return call.value, f"{name} {verb}{call.error}" if call.error else ""


def _text_after(turn: str, observation: str | Sequence[Message]) -> str:
    """Return an observation as text.

    Raises:
        CallError: It has the turn that it answers, as a message of the assistant.
    """
    for message in observation if not isinstance(observation, str) else ():
        said = message["content"].strip()
        if message["role"] == "assistant" and said and said == turn.strip():
            raise CallError("step returned the policy's turn again, as a message: return what follows it alone")
    return str(observation)
