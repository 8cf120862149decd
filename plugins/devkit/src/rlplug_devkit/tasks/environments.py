"""Conformance kit of environments: the checks that an environment must pass, from general to special."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from rlplug.errors import ConfigError
from rlplug.interfaces.environment import Environment, StepResult
from rlplug.rollout.turns.environment_calls import ask_environment
from rlplug.rollout.turns.step_answer import StepAnswer, read_step
from rlplug.timeouts import CallError
from rlplug.types import Prompt
from rlplug_devkit.tasks.calls import HOSTILE, NOT_COMPARED, NUM_THREADS, TaskChecks, run_calls, same_random_generators

SEED = 17


def make_prompt(text: str = "a>", answer: Any = None, **metadata: Any) -> Prompt:
    """Return a prompt with a token for each character, and the other fields of its task."""
    return Prompt("made-up:1", tuple(ord(character) % 1000 for character in text), text, answer, metadata)


@dataclass(frozen=True)
class Played:
    """What an environment answered to some turns, until it was done or a call failed."""

    answers: tuple[StepAnswer, ...]
    observations: tuple[Any, ...]
    error: str = ""
    """Name of the call that failed, and how."""
    malformed: str = ""
    """What is wrong with an answer."""


class EnvironmentConformance(TaskChecks):
    """Checks of an environment. A subclass must override ``make_environment``, and may override the rest.

    Attributes:
        is_deterministic: Whether the same prompt, seed and turns always have the same answers; without that a run
            cannot be resumed.
        max_observation_chars: Longest observation in characters, whatever the policy writes: a longer one would end
            trajectories.
    """

    is_deterministic: ClassVar[bool] = True
    max_observation_chars: ClassVar[int] = 100_000

    def make_environment(self) -> Environment:
        """Return an environment, as a YAML file would make it for one trajectory."""
        raise NotImplementedError(f"{type(self).__name__}.make_environment must return the environment to test")

    def prompts(self) -> Sequence[Prompt]:
        """Return at least two prompts of tasks with different answers; see :func:`make_prompt`."""
        return [make_prompt("a>", answer="c"), make_prompt("b>", answer="y")]

    def turns(self) -> Sequence[str]:
        """Return what the policy says in turn, in a trajectory of some turns."""
        return ["m", "x", "c"]

    def _subject(self) -> str:
        return type(self.make_environment()).__name__

    def _play(
        self, prompt: Prompt, turns: Sequence[str], environment: Environment | None = None, seed: int = SEED
    ) -> Played:
        """Play turns in an environment and close it; each call gets its deadline, as in a run."""
        played = self.make_environment() if environment is None else environment
        own = dataclasses.replace(
            prompt, answer=copy.deepcopy(prompt.answer), metadata=copy.deepcopy(dict(prompt.metadata))
        )
        answers: list[StepAnswer] = []
        seen: list[Any] = []
        error = self._call("reset", functools.partial(played.reset, own, seed))[1]
        malformed = ""
        for turn in turns if not error else ():
            result, error = self._call("step", functools.partial(played.step, turn))
            if error:
                break
            try:
                answers.append(read_step(result, str, self.max_observation_chars))
            except CallError as problem:
                malformed = str(problem)
                break
            seen.append(result.observation if isinstance(result, StepResult) else None)
            if answers[-1].done:
                break
        error = error or self._call("close", played.close)[1]
        return Played(tuple(answers), tuple(seen), error, malformed)

    def _call(self, name: str, function: Callable[[], Any]) -> tuple[Any, str]:
        (call,) = run_calls([function], self.deadline_s)
        return (
            call.value,
            f"{name} {'' if 'took longer' in call.error else 'raised '}{call.error}" if call.error else "",
        )

    def _compared(self, played: Played) -> Played:
        """Return what was played; skip the check where calls failed."""
        if played.error or played.malformed:
            pytest.skip(NOT_COMPARED)
        return played

    # ---- what a run needs of every environment --------------------------------------------------------------------

    def test_tools_and_notes_are_readable(self) -> None:
        try:
            ask_environment(self.make_environment)
        except ConfigError as problem:
            pytest.fail(f"a run refuses the environment at its start: {problem}", pytrace=False)

    def test_calls_end_by_their_deadline(self) -> None:
        for prompt in self.prompts():
            error = self._play(prompt, self.turns()).error
            assert "took longer" not in error, (
                f"{error}. Give what it waits for a shorter deadline, and await instead of blocking in async methods."
            )

    def test_turns_are_answered_without_exceptions(self) -> None:
        for prompt in self.prompts():
            error = self._play(prompt, self.turns()).error
            raised = error if "took longer" not in error and not error.startswith("close") else ""
            assert not raised, (
                f"on the prompt {prompt.text!r}, {raised}. Override prompts() and turns() to fit its tasks."
            )

    def test_answers_are_well_formed(self) -> None:
        for prompt in self.prompts():
            malformed = self._play(prompt, self.turns()).malformed
            assert not malformed, (
                f"{malformed}. Return StepResult(text or messages, reward=a number, done=a bool, metrics=numbers)."
            )

    def test_close_succeeds_after_any_call(self) -> None:
        """A run closes an environment once: when it is done, and after a failure of any call, the first one too."""
        for name, turns in (("its constructor", None), ("reset", []), ("a step", self.turns()[:1])):
            environment = self.make_environment()
            if turns is None:
                error = self._call("close", environment.close)[1]
            else:
                error = self._play(self.prompts()[0], turns, environment).error
            assert not error.startswith("close"), (
                f"after {name}, {error}. Let close release what there is, and nothing more."
            )

    # ---- what its answers depend on -------------------------------------------------------------------------------

    def test_the_same_turns_have_the_same_answers(self) -> None:
        """A resumed run makes a new object, and repeats the turns of an unfinished trajectory."""
        if not self.is_deterministic:
            pytest.skip("does not apply: is_deterministic is False")
        for prompt in self.prompts():
            first = self._compared(self._play(prompt, self.turns()))
            again = self._compared(self._play(prompt, self.turns()))
            assert first == again, (
                f"two objects answered {_told(first)} and {_told(again)}: draw from random.Random(seed) alone, of the "
                "seed that reset gets, and keep nothing in the class or its module."
            )

    def test_trajectories_do_not_see_each_other(self) -> None:
        """Objects of a run are alive at the same time; what one keeps in its class, another overwrites."""
        if not self.is_deterministic:
            pytest.skip("does not apply: is_deterministic is False")
        prompts, turns = self.prompts(), self.turns()
        alone = [self._compared(self._play(prompt, turns)) for prompt in prompts]
        if alone != [self._play(prompt, turns) for prompt in prompts]:
            pytest.skip(NOT_COMPARED)
        rounds = [prompt for _ in range(NUM_THREADS // 2) for prompt in prompts]
        environments = [self.make_environment() for _ in rounds]  # all before the first is used
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            together = list(threads.map(lambda p, e: self._play(p, turns, e), rounds, environments))
        for index, played in enumerate(together):
            expected = alone[index % len(prompts)]
            assert self._compared(played) == expected, (
                f"beside others, a trajectory was answered {_told(played)}, and alone {_told(expected)}: keep its "
                "state in self, and in nothing that objects share."
            )

    def test_the_task_decides_the_answers(self) -> None:
        """An environment that ignores the prompt rewards every policy alike."""
        if not self.is_deterministic:
            pytest.skip("does not apply: is_deterministic is False")
        prompt, turns = self.prompts()[0], self.turns()
        first = self._compared(self._play(prompt, turns))
        other = self._compared(self._play(self.prompts()[1], turns))
        assert first != other, (
            f"prompts with other answers were answered alike, {_told(first)}: read the task in reset, and override "
            "prompts() and turns() where these tasks have the same answers."
        )

    def test_global_random_generators_are_left_alone(self) -> None:
        with same_random_generators("the environment"):
            self._play(self.prompts()[0], self.turns())

    # ---- what a policy may write ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("what", HOSTILE)
    def test_any_text_is_answered(self, what: str) -> None:
        played = self._play(self.prompts()[0], [HOSTILE[what]])
        advice = "Answer what is malformed with an observation that says so: a policy writes anything."
        problem = played.error or played.malformed
        if "took longer" in problem and "took longer" in self._play(self.prompts()[0], self.turns()[:1]).error:
            pytest.skip(NOT_COMPARED)
        assert not problem or problem.startswith("close"), f"a turn of {what}: {problem}. {advice}"

    def test_observations_are_bounded(self) -> None:
        """What the policy writes may come back, and then fills its context."""
        played = self._play(self.prompts()[0], ["abc " * self.max_observation_chars])
        if played.error or played.malformed:
            pytest.skip(NOT_COMPARED)
        assert all(answer.text is not None for answer in played.answers), (
            f"a long turn is answered with more than {self.max_observation_chars} characters: cut what is repeated."
        )


def _told(played: Played) -> list[tuple[Any, float, bool]]:
    return [
        (seen, answer.reward, answer.done) for seen, answer in zip(played.observations, played.answers, strict=True)
    ]
