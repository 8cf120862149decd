"""Environments and sources of a draw that the kits did not know, one mistake each."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from simple_environments import Guess
from simple_sources import Rows

from rlplug.data.prompt_stream import PromptStream
from rlplug.data.sources import AllRows
from rlplug.errors import ConfigError
from rlplug.interfaces import StepResult
from rlplug.types import Prompt, Sample


class LooksUpWhatToolsLoaded(Guess):
    """A run asks one object for its tools, and plays in others."""

    index: Mapping[str, str] = {}

    def tools(self) -> Sequence[Mapping[str, Any]]:
        self.index = {"m": "the thirteenth letter"}
        return ()

    def step(self, completion: str) -> Any:
        result = super().step(completion)
        return StepResult(f"{self.index.get(completion, 'nothing')}, {result.observation}", done=result.done)


class KeepsTheLoop(Guess):
    """An async step that waits for something with the whole event loop."""

    async def step(self, completion: str) -> Any:
        time.sleep(0.08)
        return super().step(completion)


class HashesSeedsOfText(Rows):
    """A mixture seeds its parts by texts, whose hash each process has of its own."""

    def for_training(self, key: str, name: str = "") -> AllRows:
        return RowsByHash(self, key, name)


class RowsByHash(AllRows):
    def prompts(self, encoder: Any, shuffle: bool, seed: int | str) -> PromptStream:
        prompts = encoder.usable("data.train", self.known)
        return PromptsByHash(prompts, shuffle, hash(seed) if isinstance(seed, str) else seed)


class PromptsByHash(PromptStream):
    def _epoch_order(self) -> list[int]:
        order = list(range(len(self)))
        if self._shuffle:
            random.Random(f"{self._seed}:{self.epoch}").shuffle(order)
        return order


class CatchesWhatIsPrinted(Guess):
    """What others print meanwhile is told too; trajectories wait for each other, so that all is restored."""

    lock: ClassVar[threading.Lock] = threading.Lock()

    def step(self, completion: str) -> Any:
        result, caught = super().step(completion), io.StringIO()
        with self.lock, contextlib.redirect_stdout(caught):
            print(result.observation)
        return StepResult(caught.getvalue(), done=result.done)


class SharesTurnsOfAPrompt(Guess):
    """The turns that are left are counted by prompt, in the class; each reset counts anew."""

    left: ClassVar[dict[str, int]] = {}

    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        self.uid = prompt.uid
        self.left[self.uid] = 20

    def step(self, completion: str) -> Any:
        self.left[self.uid] -= 1
        result = super().step(completion)
        return StepResult(result.observation, done=result.done or self.left[self.uid] <= 0)


class NamesItselfForTheKey(Rows):
    """A mistake in one of a mixture's sources is then in none, unless it is the path."""

    def for_training(self, key: str, name: str = "") -> AllRows:
        return AllRows(self, type(self).__name__ if self.path == "here" else key, name)


class LearnsForTheNextPass(Rows):
    """Leaves out in the second pass what was solved in the first, and forgets it in its state."""

    def for_training(self, key: str, name: str = "") -> AllRows:
        return RowsOfPasses(self, key, name)

    def rows(self) -> Any:
        yield from super().rows()
        yield from map(self.row, range(10, 40))


class RowsOfPasses(AllRows):
    def prompts(self, encoder: Any, shuffle: bool, seed: int | str) -> PromptStream:
        return PromptsOfPasses(encoder.usable("data.train", self.known), shuffle, seed)


class PromptsOfPasses(PromptStream):
    solved: frozenset[str] = frozenset()

    def observe(self, samples: Sequence[Sample], gather_arrays: Any) -> None:
        names = [prompt.uid for prompt in self._prompts]
        won = np.array([names.index(each.prompt.uid) for each in samples if each.reward == 1.0], np.int64)
        self.solved |= {names[place] for place in gather_arrays(won)}

    def take(self, num_prompts: int) -> list[Prompt]:
        taken: list[Prompt] = []
        while len(taken) < num_prompts:
            is_first = self.epoch == 0
            (prompt,) = super().take(1)
            if is_first or prompt.uid not in self.solved or len(self.solved) == len(self):
                taken.append(prompt)
        return taken


class AnswersInSmallLetters(Guess):
    """Keeps answers for all objects, by what the policy says in small letters."""

    known: ClassVar[dict[tuple[str, str], Any]] = {}

    def step(self, completion: str) -> Any:
        return self.known.setdefault((self.answer, completion.lower()), super().step(completion))


class CountsLosses(Rows):
    """Counts rewards below 0 for the log, and forgets them in its state."""

    def for_training(self, key: str, name: str = "") -> AllRows:
        return RowsWithLosses(self, key, name)


class RowsWithLosses(AllRows):
    def prompts(self, encoder: Any, shuffle: bool, seed: int | str) -> PromptStream:
        return PromptsWithLosses(encoder.usable("data.train", self.known), shuffle, seed)


class PromptsWithLosses(PromptStream):
    num_losses = 0

    def observe(self, samples: Sequence[Sample], gather_arrays: Any) -> None:
        self.num_losses += int((gather_arrays(np.array([each.reward for each in samples])) < 0).sum())

    def metrics(self) -> dict[str, float]:
        return {"losses": float(self.num_losses)}


class SaltsItsState(Rows):
    """Knows its state by a hash that each process has of its own."""

    def for_training(self, key: str, name: str = "") -> AllRows:
        return SaltedRows(self, key, name)


class SaltedRows(AllRows):
    def prompts(self, encoder: Any, shuffle: bool, seed: int | str) -> PromptStream:
        return SaltedPrompts(encoder.usable("data.train", self.known), shuffle, seed)


class SaltedPrompts(PromptStream):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"hash": hash("rows")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("hash") != hash("rows"):
            raise ConfigError("The state is of other prompts: give theirs.")
        super().load_state_dict(state)


class EndsWhenAllIsSolved(Rows):
    """Draws nothing more when one step had every prompt, and each was solved."""

    def for_training(self, key: str, name: str = "") -> AllRows:
        return RowsToSolve(self, key, name)


class RowsToSolve(AllRows):
    def prompts(self, encoder: Any, shuffle: bool, seed: int | str) -> PromptStream:
        return PromptsToSolve(encoder.usable("data.train", self.known), shuffle, seed)


class PromptsToSolve(PromptStream):
    is_over = False

    def observe(self, samples: Sequence[Sample], gather_arrays: Any) -> None:
        rewards = gather_arrays(np.array([each.reward for each in samples]))
        self.is_over = len(rewards) >= len(self) and bool((rewards == 1).all())

    def take(self, num_prompts: int) -> list[Prompt]:
        return [] if self.is_over else super().take(num_prompts)


class SharesItsMetadata(Rows):
    """All rows have one list among their metadata."""

    levels: ClassVar[list[int]] = [1, 2]

    def row(self, index: int) -> Any:
        return dataclasses.replace(super().row(index), metadata={"levels": self.levels})


class ReadsAnyDigit(Guess):
    """Reads a number of two digits, whatever ``isdigit`` takes for one."""

    TURNS = ("a", "12", "z", "m")

    def step(self, completion: str) -> Any:
        result = super().step(completion)
        if len(completion) == 2 and completion.isdigit():
            return StepResult(f"{int(completion)}, {result.observation}")
        return result


class CountsWinsAlone(Guess):
    """Ends after 30 turns too, and measures ``won`` of what was won."""

    def step(self, completion: str) -> Any:
        result = super().step(completion)
        metrics = {"won": 1.0} if result.done else {}
        return StepResult(result.observation, done=result.done or self.turns >= 30, metrics=metrics)


CAUGHT_BY = {
    "environment": {
        "ReadsAnyDigit": {"test_digits_of_other_scripts_are_answered"},
        "CountsWinsAlone": {"test_metrics_of_ends_are_shares"},
        "AnswersInSmallLetters": {"test_drawn_trajectories_are_answered_as_by_another_process"},
        "LooksUpWhatToolsLoaded": {"test_objects_that_were_not_asked_answer_alike"},
        "KeepsTheLoop": {"test_async_calls_let_others_run"},
        "CatchesWhatIsPrinted": {"test_calls_replace_nothing_of_the_process"},
        "SharesTurnsOfAPrompt": {"test_trajectories_of_one_prompt_do_not_see_each_other"},
    },
    "source": {
        "EndsWhenAllIsSolved": {"test_prompts_go_on_whatever_all_rewards_are"},
        "SharesItsMetadata": {"test_rows_are_objects_of_their_own"},
        "SaltsItsState": {"test_a_state_of_another_process_is_taken"},
        "CountsLosses": {"test_drawn_steps_are_resumed_and_shared"},
        "HashesSeedsOfText": {"test_a_seed_may_be_a_text"},
        "NamesItselfForTheKey": {"test_errors_of_rows_are_told_by_the_key"},
        "LearnsForTheNextPass": {"test_observed_samples_go_on_too"},
    },
}
"""For each kind: its mistakes, and the checks that find each."""
