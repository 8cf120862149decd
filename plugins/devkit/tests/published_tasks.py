"""Environments and sources with what plugins are published with: on another machine, of a group, late, too long.

``test_task_sabotage.py`` runs them through their kits.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from simple_environments import Guess
from simple_sources import Rows

from rlplug.data.prompt_stream import PromptStream
from rlplug.data.sources import AllRows, PromptRow
from rlplug.interfaces import StepResult
from rlplug.types import Prompt

# ---- environments ---------------------------------------------------------------------------------------------------


class SharesTheBoardOfAPrompt(Guess):
    """Which all trajectories of a group have."""

    boards: ClassVar[dict[str, dict[int, str]]] = {}

    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        self.board = self.boards.setdefault(prompt.uid, {})

    def step(self, completion: str) -> Any:
        told = super().step(completion)
        self.board[self.turns] = completion[:5]
        return StepResult(f"{told.observation} after {self.board.get(self.turns - 1)}", done=told.done)


class TakesDigitsForNumbers(Guess):
    def step(self, completion: str) -> Any:
        told = super().step(completion)
        cost = int(completion) if completion.isdigit() and len(completion) < 9 else 0
        return StepResult(told.observation, reward=-float(cost), done=told.done)


class FindsATag(Guess):
    """Which a policy may close before it opens it."""

    def step(self, completion: str) -> Any:
        if "</answer>" in completion:
            start = completion.index("<answer>") + len("<answer>")
            completion = "x" if completion.index("</answer>", start) == start else completion[start:]
        return super().step(completion)


class TellsAllMessagesAgain(Guess):
    """A history, which grows, in place of what is new in it."""

    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        self.history: list[dict[str, str]] = []

    def step(self, completion: str) -> Any:
        told = super().step(completion)
        self.history.append({"role": "user", "content": str(told.observation)})
        return dataclasses.replace(told, observation=self.history)


class ComputesAnyPower(Guess):
    def step(self, completion: str) -> Any:
        told = super().step(completion)
        try:
            value = str(self.value(ast.parse(completion, mode="eval").body))[:20]
        except Exception:  # noqa: BLE001 - what is no sum
            value = ""
        return StepResult(f"{told.observation} {value}", done=told.done)

    def value(self, node: Any) -> int:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            return int(operator.pow(self.value(node.left), self.value(node.right)))
        return int(node.value)


class AsksAgainWhenCancelled(Guess):
    async def step(self, completion: str) -> Any:
        for _ in range(3):
            try:
                await asyncio.sleep(0.01)
                break
            except BaseException:  # noqa: BLE001 - the mistake
                continue
        return super().step(completion)


class TellsTheTurnAgain(Guess):
    """As a message of the assistant, before its own."""

    def step(self, completion: str) -> Any:
        told = super().step(completion)
        said = [{"role": "assistant", "content": completion[:50]}, {"role": "user", "content": told.observation}]
        return StepResult(said, done=told.done)


# ---- sources --------------------------------------------------------------------------------------------------------


class HasAnEncodingOfItsHost(Rows):
    unit = "m²"

    def row(self, index: int) -> Any:
        with open(__file__) as file:
            unit = file.read().partition('unit = "')[2].partition('"')[0]
        return PromptRow(f"rows:{index}", f"{index} {unit}>", str(index), {})


class OrdersFilesByTheirTimes(Rows):
    def row(self, index: int) -> Any:
        files = sorted([Path(__file__), Path(os.__file__)], key=os.path.getmtime)
        return PromptRow(f"rows:{index}", f"{files[index % 2].name} {index}>", str(index), {})


class LongRows(Rows):
    """Each row is longer than the one before, and its training prompts are of other classes."""

    stream: ClassVar[type[PromptStream]] = PromptStream

    def row(self, index: int) -> Any:
        return PromptRow(f"rows:{index}", "x" * index + ">", str(index), {})

    def for_training(self, key: str, name: str = "") -> AllRows:
        encoded, stream = self.encoded, self.stream

        class Its(AllRows):
            def prompts(self, encoder: Any, shuffle: bool, seed: int | str) -> PromptStream:
                return stream(encoded(encoder, self._key, self.known), shuffle, seed)

        return Its(self, key, name)

    @staticmethod
    def encoded(encoder: Any, key: str, rows: Sequence[PromptRow]) -> list[Prompt]:
        prompts: list[Prompt] = encoder.usable(key, rows)
        return prompts


class TrainsOnAnyLength(LongRows):
    @staticmethod
    def encoded(encoder: Any, key: str, rows: Sequence[PromptRow]) -> list[Prompt]:
        prompts: list[Prompt] = encoder.encode(key, rows)
        encoder.check(key, prompts)
        return prompts


class AsksNoReward(LongRows):
    @staticmethod
    def encoded(encoder: Any, key: str, rows: Sequence[PromptRow]) -> list[Prompt]:
        prompts: list[Prompt] = encoder.keep(key, encoder.encode(key, rows))
        return prompts


class MixesAnswers(LongRows):
    """Each prompt has the answer of the row before."""

    @staticmethod
    def encoded(encoder: Any, key: str, rows: Sequence[PromptRow]) -> list[Prompt]:
        prompts: list[Prompt] = encoder.usable(key, rows)
        return [dataclasses.replace(p, answer=other.answer) for p, other in zip(prompts, [*prompts[-1:], *prompts])]  # noqa: B905


class NumberedSeeds(PromptStream):
    def __init__(self, prompts: Sequence[Prompt], shuffle: bool, seed: Any) -> None:
        super().__init__(prompts, shuffle, seed + 1)


class TakesNumbersForSeeds(LongRows):
    """A mixture gives texts."""

    stream = NumberedSeeds


class TwoPasses(PromptStream):
    def take(self, num_prompts: int) -> list[Prompt]:
        return super().take(min(num_prompts, 2 * len(self)))


class TakesTwoPassesAtMost(LongRows):
    stream = TwoPasses


CAUGHT_BY: dict[str, dict[str, set[str]]] = {
    "environment": {
        "SharesTheBoardOfAPrompt": {"test_trajectories_of_one_prompt_do_not_see_each_other"},
        "TakesDigitsForNumbers": {"test_any_text_is_answered[a digit that is no number]"},
        "FindsATag": {"test_any_text_is_answered[a tag that is never closed]"},
        "ComputesAnyPower": {"test_turns_that_are_costly_to_read_are_answered"},
        "AsksAgainWhenCancelled": {"test_a_cancelled_call_ends"},
        "TellsAllMessagesAgain": {"test_many_turns_are_answered"},
        "TellsTheTurnAgain": {"test_answers_are_well_formed"},
    },
    "source": {
        "HasAnEncodingOfItsHost": {"test_another_process_reads_the_same_rows"},
        "OrdersFilesByTheirTimes": {"test_another_process_reads_the_same_rows"},
        "TrainsOnAnyLength": {"test_prompts_that_are_too_long_do_not_train[filter]"},
        "AsksNoReward": {"test_prompts_that_a_reward_refuses_do_not_train"},
        "MixesAnswers": {"test_prompts_are_of_their_rows"},
        "TakesNumbersForSeeds": {"test_a_seed_may_be_a_text"},
        "TakesTwoPassesAtMost": {"test_draws_of_any_size_go_on_at_their_place"},
    },
}
"""For each kind: its mistakes, and the checks that find each."""
