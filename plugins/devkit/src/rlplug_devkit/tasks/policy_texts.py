"""Checks of an environment on what a policy may write: any text, at once, and for as long as it likes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from typing import Any, Final

import pytest

from rlplug.interfaces import StepResult
from rlplug.timeouts import Call
from rlplug_devkit.tasks.calls import HOSTILE
from rlplug_devkit.tasks.elsewhere import ask_elsewhere
from rlplug_devkit.tasks.trajectories import TrajectoryChecks

COSTLY: Final = ("9**9**9**9", "a" * 40 + "!", "1," * 40 + "x", "x " * 40 + "?", "(" * 40 + "1" + ")" * 39)
"""Turns that a calculator, or a pattern with nested repetitions, would work on for years."""
OTHER_DIGITS: Final = {
    "superscripts": "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079",
    "Arabic digits": "\u0660\u0661\u0662\u0663\u0664\u0665\u0666\u0667\u0668\u0669",
}
"""0 to 9 in other characters; superscripts are digits and no decimals."""
PENDING_S: Final = 3.0
"""Longest time for a call to end that was cancelled, in seconds."""


class PolicyTextChecks(TrajectoryChecks):
    """Checks of turns that no author writes down."""

    @pytest.mark.parametrize("what", HOSTILE)
    def test_any_text_is_answered(self, what: str) -> None:
        """As the first turn, and as a later one."""
        for turns in ([HOSTILE[what]], [*self.turns()[:1], HOSTILE[what]]):
            played = self._play(self.prompts()[0], turns)
            problem = played.error or played.malformed
            if problem:
                self._compared(self._play(self.prompts()[0], self.turns()))
            assert not problem, (
                f"a turn of {what}: {problem}. Answer what is malformed with an observation that says so: a policy "
                "writes anything."
            )

    def test_turns_that_are_costly_to_read_are_answered(self) -> None:
        """A power, or a pattern with nested repetitions, may hold the interpreter's lock, and no deadline ends that."""
        self._skip_after_failure()
        self._elsewhere("_subject")  # starts the other process
        try:
            problem = ask_elsewhere(self, "_of_costly_turns", len(COSTLY) * self.deadline_s)
        except (LookupError, RuntimeError) as error:
            problem = str(error)
        assert not problem, (
            f"on one of the turns {COSTLY}: {problem}. Bound what is computed of a turn, or compute it in a process "
            "that is ended at its deadline."
        )

    def _of_costly_turns(self) -> str:
        """Return what went wrong with turns that are costly to read; empty if nothing did."""
        problems = (self._trajectory(self.prompts()[0], [turn]).problem for turn in COSTLY)
        return next(filter(None, problems), "")

    def test_observations_are_bounded(self) -> None:
        """What the policy writes may come back, at once or when it asks for it, and then fills its context."""
        long = "abc " * self.max_observation_chars
        for turns in ([long], *([f"{turn} {long}", *self.turns()] for turn in self.turns())):
            played = self._compared(self._play(self.prompts()[0], turns))
            assert all(answer.text is not None for answer in played.answers), (
                f"turns of which the first is long, {turns[0][:40]!r}..., are answered with more than "
                f"{self.max_observation_chars} characters: cut what is repeated."
            )

    def test_digits_of_other_scripts_are_answered(self) -> None:
        """``isdigit`` and ``\\d`` are true of some that ``int`` and ``float`` refuse."""
        turns = [turn for turn in self.turns() if any(map(str.isdecimal, turn))]
        if not turns:
            pytest.skip("does not apply: no turn has a digit")
        for name, digits in OTHER_DIGITS.items():
            others = [turn.translate(str.maketrans("0123456789", digits)) for turn in turns]
            for said in (others, *([other] for other in others)):
                played = self._play(self.prompts()[0], said)
                problem = played.error or played.malformed
                assert not problem, f"with {name} the turns {said}: {problem}. A policy writes anything: answer it."

    def test_a_cancelled_call_ends(self) -> None:
        """A run cancels an ``async`` call past its deadline; one that goes on works beside others for ever."""
        self._skip_after_failure()
        with self._guard().around("a cancelled step"):
            whole, cut = self._answered_when(is_cancelled=False), self._answered_when(is_cancelled=True)
        if whole.error:
            self._not_compared(f"a step raised {whole.error}")
        if whole.value is None:
            pytest.skip("does not apply: step does not wait for anything on the event loop")
        answered = "answered all the same" if not cut.error else f"then {cut.error}"
        assert not cut.error and cut.value != whole.value, (  # noqa: PT018 - of one call
            f"step was cancelled, and {answered}: let asyncio.CancelledError pass, and catch Exception rather than "
            "BaseException."
        )

    def _answered_when(self, is_cancelled: bool) -> Call:
        """Return the call of a trajectory's first step, which is cancelled while it waits or not."""
        environment = self.make_environment()
        problem = self._reset(environment, self.prompts()[0])
        if problem:
            self._not_compared(problem)

        def step() -> Any:
            returned = environment.step(self.turns()[0])
            return _awaited(returned, is_cancelled) if inspect.isawaitable(returned) else None

        (call,) = self._calls([step], read=lambda returned: returned)
        self._close(environment)
        return call


async def _awaited(step: Awaitable[StepResult], is_cancelled: bool) -> list[Any] | None:
    """Return what a step answers; nothing where it was cancelled, and ``None`` where it does not wait.

    Raises:
        TimeoutError: It had not ended in time after it was cancelled.
    """
    task = asyncio.ensure_future(step)
    await asyncio.sleep(0)
    if task.done():
        return None
    if is_cancelled:
        task.cancel()
        if not (await asyncio.wait({task}, timeout=PENDING_S))[0]:
            raise TimeoutError(f"it has not ended after {PENDING_S:g} s")
        if task.cancelled() or task.exception() is not None:
            return []
    answer = await task
    return [answer.observation, answer.reward, answer.done]
