"""More environments with one mistake each, which ``test_task_sabotage.py`` runs through their kit."""

from __future__ import annotations

import logging
import resource
import signal
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from broken_rewards import LEFT
from simple_environments import Guess

from rlplug.interfaces import StepResult
from rlplug.types import Prompt

# ---- process and machine --------------------------------------------------------------------------------------------


class LeavesItsThread(Guess):
    """Its ``close`` forgets a thread."""

    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        ends = threading.Event()
        LEFT.append(ends)
        threading.Thread(target=ends.wait, daemon=True).start()


class LeavesItsFolder(Guess):
    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        LEFT.append(Path(tempfile.mkdtemp()))


class LeavesItsFileOpen(Guess):
    def step(self, completion: str) -> Any:
        LEFT.append(Path("/dev/null").open("w"))  # noqa: SIM115 - that is the mistake
        return super().step(completion)


class MakesErrorsOfWarnings(Guess):
    def step(self, completion: str) -> Any:
        warnings.simplefilter("error")
        return super().step(completion)


class KeepsAGameLog(Guess):
    def close(self) -> None:
        Path("games.log").write_text("played")


class LowersALimit(Guess):
    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


class QuietsAsyncio(Guess):
    def tools(self) -> Any:
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        return ()


# ---- the same input, the same result --------------------------------------------------------------------------------


class HashesTheTask(Guess):
    def step(self, completion: str) -> Any:
        told = super().step(completion)
        return StepResult(f"{told.observation} {hash(self.answer) % 1000}", done=told.done)


class ListsASet(Guess):
    def step(self, completion: str) -> Any:
        told = super().step(completion)
        return StepResult(f"{told.observation}, not one of {list({*'abcdefgh'} - {completion})}", done=told.done)


class SeedsWith32Bits(Guess):
    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        self.state = np.random.RandomState(seed)


class CountsTrajectories(Guess):
    num_trajectories: ClassVar[int] = 0

    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        type(self).num_trajectories += 1

    def step(self, completion: str) -> Any:
        told = super().step(completion)
        return StepResult(f"{told.observation} in game {self.num_trajectories}", done=told.done)


class ClosesWhatAllShare(Guess):
    is_open: ClassVar[bool] = False

    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        type(self).is_open = True

    def step(self, completion: str) -> Any:
        if not self.is_open:
            raise ConnectionError("closed")
        return super().step(completion)

    def close(self) -> None:
        type(self).is_open = False


class HasThreeHints(Guess):
    def step(self, completion: str) -> Any:
        told = super().step(completion)
        return StepResult(f"{told.observation} {('a', 'b', 'c', 'd')[self.turns - 1]}", done=told.done)


class RemembersTurns(Guess):
    known: ClassVar[dict[str, Any]] = {}

    def step(self, completion: str) -> Any:
        return self.known.setdefault(completion, super().step(completion))


class BelongsToAThread(Guess):
    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        self.thread = threading.current_thread()

    def step(self, completion: str) -> Any:
        if threading.current_thread() is not self.thread:
            raise RuntimeError("of another thread")
        return super().step(completion)


class SetsASignal(Guess):
    """Which the main thread alone can."""

    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)


# ---- claims against effect ------------------------------------------------------------------------------------------


class SwapsItsAnswers(Guess):
    def step(self, completion: str) -> Any:
        told = super().step(completion)
        return StepResult({"later": "earlier", "earlier": "later"}[str(told.observation)], done=told.done)


class NumbersItsTools(Guess):
    num_objects: ClassVar[int] = 0

    def tools(self) -> Any:
        type(self).num_objects += 1
        return [{"name": f"search{self.num_objects}"}]


class HasToolsInASet(Guess):
    def tools(self) -> Any:
        return [{"name": name} for name in {*"abcdefgh"}]


class PreparesInTools(Guess):
    """A run asks another object for its tools than those that it plays with."""

    def tools(self) -> Any:
        self.words = {"m": "middle"}
        return ()

    def step(self, completion: str) -> Any:
        told = super().step(completion)
        return StepResult(f"{told.observation} {self.words.get(completion)}", done=told.done)


class SaysDoneInWords(Guess):
    def step(self, completion: str) -> Any:
        told = super().step(completion)
        return StepResult(told.observation, done="yes" if told.done else "no")  # type: ignore[arg-type]


# ---- late and empty -------------------------------------------------------------------------------------------------


class ConnectsFirst(Guess):
    def __init__(self) -> None:
        time.sleep(0.15)


class ClosesLate(Guess):
    def close(self) -> None:
        time.sleep(0.15)


class AnswersNothing(Guess):
    def step(self, completion: str) -> Any:
        told = super().step(completion)
        return None if told.done else told


class BlocksItsLoop(Guess):
    async def step(self, completion: str) -> Any:
        time.sleep(0.5)
        return super().step(completion)


CAUGHT_BY = {
    "LeavesItsThread": {"test_trajectories_leave_nothing_behind"},
    "LeavesItsFolder": {"test_trajectories_leave_nothing_behind"},
    "LeavesItsFileOpen": {"test_trajectories_leave_nothing_behind"},
    "MakesErrorsOfWarnings": {"test_the_process_is_left_as_it_was"},
    "KeepsAGameLog": {"test_the_process_is_left_as_it_was"},
    "LowersALimit": {"test_the_process_is_left_as_it_was"},
    "QuietsAsyncio": {"test_the_process_is_left_as_it_was"},
    "HashesTheTask": {"test_another_process_has_the_same_answers"},
    "ListsASet": {"test_another_process_has_the_same_answers"},
    "SeedsWith32Bits": {"test_turns_are_answered_without_exceptions"},
    "CountsTrajectories": {"test_the_same_turns_have_the_same_answers"},
    "ClosesWhatAllShare": {"test_trajectories_do_not_see_each_other"},
    "HasThreeHints": {"test_many_turns_are_answered"},
    "RemembersTurns": {"test_the_task_decides_the_answers"},
    "BelongsToAThread": {"test_turns_are_answered_without_exceptions"},
    "SetsASignal": {"test_turns_are_answered_without_exceptions"},
    "SwapsItsAnswers": {"test_turns_have_the_expected_answers"},
    "NumbersItsTools": {"test_tools_are_the_same_each_time"},
    "HasToolsInASet": {"test_tools_are_the_same_each_time"},
    "PreparesInTools": {"test_turns_are_answered_without_exceptions"},
    "SaysDoneInWords": {"test_answers_are_well_formed"},
    "ConnectsFirst": {"test_calls_end_by_their_deadline"},
    "ClosesLate": {"test_calls_end_by_their_deadline"},
    "AnswersNothing": {"test_answers_are_well_formed"},
    "BlocksItsLoop": {"test_calls_end_by_their_deadline"},
}
"""Mistakes, and the checks that find each."""
