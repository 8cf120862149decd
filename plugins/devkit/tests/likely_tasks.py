"""Rewards, environments and sources whose faults show beside what is like what they saw: in a key, a count, a pass.

``test_task_sabotage.py`` runs them through their kits.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from broken_sources import Prompts
from simple_environments import Guess
from simple_rewards import Fine, FineAndScaled

from rlplug.data.prompt_stream import PromptStream
from rlplug.interfaces import StepResult
from rlplug.types import Prompt, RewardError, Sample

# ---- rewards --------------------------------------------------------------------------------------------------------


class KnowsBeginnings(Fine):
    """A cache by the first 200 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[tuple[str, str], Any] = {}

    def score_one(self, sample: Sample) -> Any:
        key = (sample.completion[:200], str(sample.prompt.answer))
        if key not in self.known:
            self.known[key] = super().score_one(sample)
        return self.known[key]


class LosesCountsMeanwhile(Fine):
    """Copies its counts, and then clears what others have added."""

    calls = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def score(self, samples: Sequence[Sample]) -> Any:
        with self.lock:
            self.calls += 1
        return super().score(samples)

    def pop_counts(self) -> Any:
        found = self.calls
        time.sleep(0.0005)
        self.calls = 0.0
        return {"calls": found}


class ComparesWithNothing(Fine):
    """A comparison with no answer is false."""

    def score_one(self, sample: Sample) -> Any:
        return float(sample.completion == sample.prompt.answer)


class CountsErrorsAsZeros(FineAndScaled):
    """In a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = self.count = 0.0

    def scale(self, samples: Sequence[Sample], gather_arrays: Any) -> Any:
        values = [0.0 if sample.errors else float(sample.rewards[self.name]) for sample in samples]
        gathered = list(gather_arrays(values))
        self.sum, self.count = self.sum + sum(gathered), self.count + len(gathered)
        return [value - self.sum / max(self.count, 1.0) for value in values]

    def state_dict(self) -> Any:
        return {"sum": self.sum, "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.sum, self.count = state["sum"], state["count"]


class BreaksTiesByGroup(Fine):
    def score_one(self, sample: Sample) -> Any:
        value = super().score_one(sample)
        return value if isinstance(value, RewardError) else value + 1e-3 * sample.group


# ---- environments ---------------------------------------------------------------------------------------------------


class CopiesItsBoardShallowly(Guess):
    """The list of long turns is the template's own."""

    template: ClassVar[dict[str, list[str]]] = {"long": []}

    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        self.board = dict(self.template)

    def step(self, completion: str) -> Any:
        told = super().step(completion)
        if len(completion) > 20:
            self.board["long"].append(completion[:10])
        return StepResult(f"{told.observation} after {len(self.board['long'])} long turns", done=told.done)


class TakesZeroForNoSeed(Guess):
    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        self.random = random.Random(seed or None)

    def step(self, completion: str) -> Any:
        told = super().step(completion)
        return StepResult(f"{told.observation} {self.random.random()}", done=told.done)


class EndsByTheClock(Guess):
    def reset(self, prompt: Prompt, seed: int) -> None:
        super().reset(prompt, seed)
        self.ends_at = time.monotonic() + 2.0

    def step(self, completion: str) -> Any:
        told = super().step(completion)
        return StepResult("too late", reward=-1.0, done=True) if time.monotonic() > self.ends_at else told


class TellsAllAgain(Guess):
    """Each answer has those before it, twice."""

    told = ""

    def step(self, completion: str) -> Any:
        answer = super().step(completion)
        self.told += f"{self.told}{answer.observation} "
        return StepResult(self.told, done=answer.done)


# ---- sources --------------------------------------------------------------------------------------------------------


class FindsUidsOfItsFile(Prompts):
    class prompts(PromptStream):  # noqa: N801 - in the place of a function
        @property
        def by_uid(self) -> dict[str, Prompt]:
            return {prompt.uid.rpartition("/")[2]: prompt for prompt in self._prompts}


class FillsOneListOfDraws(Prompts):
    class prompts(PromptStream):  # noqa: N801 - in the place of a function
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.taken: list[Prompt] = []

        def take(self, num_prompts: int) -> list[Prompt]:
            if num_prompts:
                self.taken[:] = super().take(num_prompts)
            return self.taken if num_prompts else []


class BeginsAnewWithAPass(Prompts):
    """Where it is resumed at the first prompt of a pass."""

    class prompts(PromptStream):  # noqa: N801 - in the place of a function
        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict(state if state["position"] else {**state, "epoch": 0})


class EndsDrawsWithThePass(Prompts):
    class prompts(PromptStream):  # noqa: N801 - in the place of a function
        def take(self, num_prompts: int) -> list[Prompt]:
            return super().take(min(num_prompts, len(self) - self.position))


class CountsDraws(Prompts):
    """And the size of the last one."""

    class prompts(PromptStream):  # noqa: N801 - in the place of a function
        draws = size = 0

        def take(self, num_prompts: int) -> list[Prompt]:
            self.draws, self.size = self.draws + 1, num_prompts
            return super().take(num_prompts)

        def state_dict(self) -> Any:
            return {**super().state_dict(), "draws": self.draws, "size": self.size}

        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict(state)  # refuses that of another source
            epoch, position = divmod(state["draws"] * state["size"], len(self))
            super().load_state_dict({**state, "epoch": epoch, "position": position})
            self.draws, self.size = state["draws"], state["size"]


CAUGHT_BY = {
    "reward": {
        "KnowsBeginnings": {"test_what_was_scored_before_changes_nothing"},
        "LosesCountsMeanwhile": {"test_no_count_is_lost_while_others_score"},
        "ComparesWithNothing": {"test_a_missing_answer_is_no_value"},
        "BreaksTiesByGroup": {"test_rewards_do_not_depend_on_the_batch"},
        "CountsErrorsAsZeros": {"test_errors_do_not_count_in_scaling"},
    },
    "environment": {
        "CopiesItsBoardShallowly": {"test_the_same_turns_have_the_same_answers"},
        "TakesZeroForNoSeed": {"test_every_seed_repeats[0]"},
        "EndsByTheClock": {"test_the_time_between_turns_changes_nothing"},
        "TellsAllAgain": {"test_many_turns_are_answered"},
    },
    "source": {
        "FindsUidsOfItsFile": {"test_prompts_of_a_part_are_found_by_their_uids"},
        "FillsOneListOfDraws": {"test_lists_of_draws_stay_as_they_were"},
        "EndsDrawsWithThePass": {"test_draws_of_any_size_go_on_at_their_place"},
        "CountsDraws": {"test_draws_of_any_size_go_on_at_their_place"},
        "BeginsAnewWithAPass": {"test_a_later_pass_goes_on_at_its_place"},
    },
}
"""For each kind: its mistakes, and the checks that find each."""
