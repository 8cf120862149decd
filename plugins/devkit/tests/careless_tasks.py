"""Rewards, environments and sources with what careless authors leave in: threads, inputs, options, folders.

``test_task_sabotage.py`` runs them through their kits. Those of a process are in ``broken_rewards.py`` and its like.
"""

from __future__ import annotations

import asyncio
import csv
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from simple_environments import Guess
from simple_rewards import Fine, FineAndScaled
from simple_sources import Rows

from rlplug.data.sources import PromptRow
from rlplug.errors import ConfigError
from rlplug.types import Prompt, RewardError, Sample

# ---- threads, and calls that meet -----------------------------------------------------------------------------------


class TakesMoreThreads(Fine):
    """Only its own thread sees the number, and each new one."""

    def score(self, samples: Sequence[Sample]) -> Any:
        torch.set_num_threads(3)
        return super().score(samples)


class RaisesNumpysErrors(Fine):
    def score(self, samples: Sequence[Sample]) -> Any:
        np.seterr(all="raise")
        return super().score(samples)


class ComputesOnTheDevice(Fine):
    def place(self, device: torch.device) -> None:
        torch.set_default_device(device)


class FillsOneList(Fine):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    def score(self, samples: Sequence[Sample]) -> Any:
        self.values.clear()
        for sample in samples:
            self.values.append(self.score_one(sample))
        return self.values


class LeavesATask(Guess):
    """Its ``close`` forgets a task of the event loop."""

    async def reset(self, prompt: Prompt, seed: int) -> None:  # type: ignore[override]
        super().reset(prompt, seed)
        self.task = asyncio.create_task(asyncio.sleep(1000))


class LiftsTheLimitOfFields(Rows):
    def rows(self) -> Any:
        csv.field_size_limit(10**9)
        return super().rows()


# ---- what they get, and in which order ------------------------------------------------------------------------------


class NumbersTasks(Fine):
    """In the order in which the process sees them."""

    known: ClassVar[dict[str, int]] = {}

    def score_one(self, sample: Sample) -> Any:
        number = self.known.setdefault(sample.prompt.text, len(self.known))
        value = super().score_one(sample)
        return value if isinstance(value, RewardError) else value + number


class FailsOnEquals(Fine):
    batch_size = 4

    def score(self, samples: Sequence[Sample]) -> Any:
        if len({sample.completion for sample in samples}) < len(samples):
            raise ZeroDivisionError("no spread")
        return super().score(samples)


class ListsAFolder(Rows):
    """In the order of the file system."""

    def rows(self) -> Any:
        if self.path != "here":
            raise ConfigError(f"{self.path} is not there: give here.")
        for name in os.listdir(Path(__file__).parent):
            yield PromptRow(name, f"{name}>", name[0], {})


# ---- claims and options ---------------------------------------------------------------------------------------------


class ClaimsLittleTime(Fine):
    deadline_s = 0.01

    def score(self, samples: Sequence[Sample]) -> Any:
        time.sleep(0.05)
        return super().score(samples)


class TakesNoCalls(Fine):
    max_calls = 0


class RoundsItsState(FineAndScaled):
    def load_state_dict(self, state: Any) -> None:
        self.largest = int(state.get("largest", 0))


class DividesByTheFirst(FineAndScaled):
    """Of a first round without a reward too."""

    def scale(self, samples: Sequence[Sample], gather_arrays: Any) -> Any:
        super().scale(samples, gather_arrays)
        found = [0.0 if sample.errors else sample.rewards[self.name] for sample in samples]
        with np.errstate(all="ignore"):
            return list(np.asarray(found) / np.float64(self.largest))


class ScalesTooFew(FineAndScaled):
    """Passes over samples with an error."""

    def scale(self, samples: Sequence[Sample], gather_arrays: Any) -> Any:
        values = super().scale(samples, gather_arrays)
        return [value for value, sample in zip(values, samples, strict=True) if not sample.errors]


class TakesAnyBonus(Fine):
    WRONG: ClassVar = {"bonus": -1.0}

    def __init__(self, bonus: float = 0.0) -> None:
        super().__init__()
        self.bonus = bonus


class NamesNoBonus(TakesAnyBonus):
    def notes(self) -> list[str]:
        if self.bonus < 0:
            raise ConfigError("it is below 0: give 0 or more")
        return []


class HasAnotherBonus(Fine):
    DEFAULTS: ClassVar = {"bonus": 1.0}

    def __init__(self, bonus: float = 0.0) -> None:
        super().__init__()


class TakesNumbersForAnswers(Fine):
    BROKEN_ANSWER: ClassVar = 4


class WaitsAfterItsEnd(Guess):
    """Its ``close`` does not end the turn that it waits in."""

    ENDLESS: ClassVar = "wait"

    def step(self, completion: str) -> Any:
        if completion == self.ENDLESS:
            time.sleep(3)
        return super().step(completion)


class TwoToolsOfOneName(Guess):
    def tools(self) -> Any:
        return [{"type": "function", "function": {"name": "look", "description": text}} for text in ("up", "down")]


class TakesAnyCost(Guess):
    WRONG: ClassVar = {"cost": -1.0}

    def __init__(self, cost: float = 0.1) -> None:
        self.cost = cost


class HasAnotherCost(Guess):
    DEFAULTS: ClassVar = {"cost": 1.0}

    def __init__(self, cost: float = 0.1) -> None:
        self.cost = cost


class TakesAnyLimit(Rows):
    WRONG: ClassVar = {"limit": -1}

    def __init__(self, path: str = "here", limit: int = 10) -> None:
        super().__init__(path)


class HasAnotherLimit(Rows):
    DEFAULTS: ClassVar = {"limit": 9}

    def __init__(self, path: str = "here", limit: int = 10) -> None:
        super().__init__(path)


class SaysErrorAlone(Rows):
    def rows(self) -> Any:
        if self.path != "here":
            raise ConfigError("error")
        return super().rows()


class NumbersItsContents(Rows):
    def row(self, index: int) -> Any:
        return PromptRow(f"rows:{index}", [{"role": "user", "content": index}], str(index), {})


PROCESS = "test_the_process_is_left_as_it_was"
CAUGHT_BY = {
    "reward": {
        "TakesMoreThreads": {PROCESS},
        "RaisesNumpysErrors": {PROCESS},
        "ComputesOnTheDevice": {PROCESS},
        "FillsOneList": {"test_concurrent_calls_do_not_mix"},
        "NumbersTasks": {"test_another_process_scores_alike"},
        "FailsOnEquals": {"test_there_is_one_value_for_each_sample"},
        "ClaimsLittleTime": {"test_calls_end_by_their_deadline"},
        "TakesNoCalls": {"test_claims_are_of_their_kinds"},
        "RoundsItsState": {"test_scaling_goes_on_from_its_state"},
        "DividesByTheFirst": {"test_scaled_values_are_numbers"},
        "ScalesTooFew": {"test_scaled_values_are_numbers"},
        "TakesAnyBonus": {"test_wrong_options_are_refused"},
        "NamesNoBonus": {"test_wrong_options_are_refused"},
        "HasAnotherBonus": {"test_defaults_are_the_documented_ones"},
        "TakesNumbersForAnswers": {"test_prompts_that_cannot_be_scored_are_refused"},
    },
    "environment": {
        "LeavesATask": {"test_trajectories_leave_nothing_behind"},
        "WaitsAfterItsEnd": {"test_close_ends_a_call_that_runs"},
        "TwoToolsOfOneName": {"test_tools_and_notes_are_readable"},
        "TakesAnyCost": {"test_wrong_options_are_refused"},
        "HasAnotherCost": {"test_defaults_are_the_documented_ones"},
    },
    "source": {
        "LiftsTheLimitOfFields": {PROCESS},
        "ListsAFolder": {"test_another_process_reads_the_same_rows"},
        "TakesAnyLimit": {"test_wrong_options_are_refused"},
        "HasAnotherLimit": {"test_defaults_are_the_documented_ones"},
        "SaysErrorAlone": {"test_what_cannot_be_read_is_a_configuration_error"},
        "NumbersItsContents": {"test_prompts_are_texts_or_messages"},
    },
}
"""Mistakes by kind, and the checks that find each."""
