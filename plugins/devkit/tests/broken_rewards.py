"""More rewards with one mistake each, which ``test_task_sabotage.py`` runs through their kit."""

from __future__ import annotations

import asyncio
import builtins
import logging
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from simple_rewards import Fine, FineAndScaled

from rlplug.errors import ConfigError
from rlplug.types import RewardError, Sample

LEFT: list[Any] = []
"""What the mistakes leave behind, for the test to release."""


def length(sample: Sample) -> float:
    return 1.0 / (1 + len(sample.completion))


# ---- process and machine --------------------------------------------------------------------------------------------


class LeavesAThread(Fine):
    def score(self, samples: Sequence[Sample]) -> Any:
        ends = threading.Event()
        LEFT.append(ends)
        threading.Thread(target=ends.wait, daemon=True).start()
        return super().score(samples)


class LeavesATemporaryFile(Fine):
    def score(self, samples: Sequence[Sample]) -> Any:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            LEFT.append(Path(file.name))
        return super().score(samples)


class KeepsItsLogOpen(Fine):
    def score(self, samples: Sequence[Sample]) -> Any:
        LEFT.append(Path("/dev/null").open("w"))  # noqa: SIM115 - that is the mistake
        return super().score(samples)


class SilencesWarnings(Fine):
    def score(self, samples: Sequence[Sample]) -> Any:
        warnings.simplefilter("ignore")
        return super().score(samples)


class LiftsTheLimitOfDigits(Fine):
    def score(self, samples: Sequence[Sample]) -> Any:
        sys.set_int_max_str_digits(0)
        return super().score(samples)


class ConfinesTheWholeProcess(Fine):
    def score(self, samples: Sequence[Sample]) -> Any:
        builtins.exit = builtins.input = None  # type: ignore[assignment]
        return super().score(samples)


class SilencesTransformers(Fine):
    def score(self, samples: Sequence[Sample]) -> Any:
        logging.getLogger("transformers").setLevel(logging.CRITICAL)
        return super().score(samples)


class WritesBesideTheData(Fine):
    def score(self, samples: Sequence[Sample]) -> Any:
        (Path.cwd().parent / "scores.txt").write_text("1")
        return super().score(samples)


class LoadsWithoutGradients(Fine):
    def notes(self) -> Any:
        torch.set_grad_enabled(False)
        return []


# ---- the same input, the same result --------------------------------------------------------------------------------


class TakesTheFirstOfASet(Fine):
    def score_one(self, sample: Sample) -> Any:
        words = {*"abcdefghijklmnop", *sample.completion}
        return float(ord(next(iter(words))) + 1000 * len(sample.completion))


class HashesTheText(Fine):
    def score_one(self, sample: Sample) -> Any:
        return float(hash(sample.completion) % 1000)


class RemembersCompletions(Fine):
    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, float] = {}

    def score_one(self, sample: Sample) -> Any:
        if sample.prompt.answer is None:
            return RewardError("no answer")
        value = length(sample) + float(sample.completion == sample.prompt.answer)
        return self.known.setdefault(sample.completion, value)


class KeepsTheFirstAnswer(Fine):
    answer = None

    def score_one(self, sample: Sample) -> Any:
        self.answer = self.answer or sample.prompt.answer
        return float(sample.completion == self.answer)


class DividesByItsBatch(Fine):
    batch_size = 4

    def score(self, samples: Sequence[Sample]) -> Any:
        largest = max(map(length, samples))
        return [length(sample) / largest for sample in samples]


class FailsBesideAnother(Fine):
    active = 0

    def score(self, samples: Sequence[Sample]) -> Any:
        self.active += 1
        try:
            if self.active > 1:
                raise RuntimeError("the connection is busy")
            time.sleep(0.02)
            return super().score(samples)
        finally:
            self.active -= 1


class FailsAtItsFifthCall(Fine):
    calls = 0

    def score(self, samples: Sequence[Sample]) -> Any:
        self.calls += 1
        if self.calls == 5:
            raise RuntimeError("the quota is used up")
        return super().score(samples)


# ---- claims against effect ------------------------------------------------------------------------------------------


class NeedsWhatItDoesNotRead(Fine):
    needs_answer = True

    def score_one(self, sample: Sample) -> Any:
        return length(sample)


class TakesPromptsWithoutAnswers(Fine):
    needs_answer = True

    def check_prompts(self, prompts: Any) -> None:
        pass

    def score_one(self, sample: Sample) -> Any:
        return length(sample) + float(sample.completion == sample.prompt.answer)


class NamesNoPrompt(TakesPromptsWithoutAnswers):
    def check_prompts(self, prompts: Any) -> None:
        if any(prompt.answer is None for prompt in prompts):
            raise ConfigError("a prompt has no answer")


class TakesAnyBeginning(Fine):
    """Nothing is a beginning of every answer."""

    needs_answer = True

    def score_one(self, sample: Sample) -> Any:
        return float(str(sample.prompt.answer).startswith(sample.completion))


class LooksForTheAnswer(Fine):
    """Among all others, if they are written too."""

    needs_answer = True

    def score_one(self, sample: Sample) -> Any:
        return float(str(sample.prompt.answer) in sample.completion.split())


class WeighsItself(Fine):
    def score_one(self, sample: Sample) -> Any:
        return self.weight * length(sample)


class ScalesGroupsAlone(Fine):
    scales_group = True


class CountsBytesAlone(Fine):
    def device_bytes(self) -> Any:
        return 1 << 30


class LooksAtTheFirstPrompt(Fine):
    def check_prompts(self, prompts: Any) -> None:
        if not prompts[0].text:
            raise ConfigError(f"{prompts[0].uid} is empty")


class MarksPrompts(Fine):
    def check_prompts(self, prompts: Any) -> None:
        for prompt in prompts:
            prompt.metadata["checked"] = True


class TakesLongForShort(Fine):
    def score_one(self, sample: Sample) -> Any:
        return 1.0 - length(sample)


class SameForAll(Fine):
    def score_one(self, sample: Sample) -> Any:
        return 0.5


# ---- late, empty, equal, huge ---------------------------------------------------------------------------------------


class AwaitsForEver(Fine):
    async def score(self, samples: Sequence[Sample]) -> Any:
        await asyncio.Event().wait()


class DividesByTheSpread(Fine):
    compares_group = True

    def score(self, samples: Sequence[Sample]) -> Any:
        values = [length(sample) for sample in samples]
        if len(values) == 1:
            return [0.0]
        return [(value - min(values)) / (max(values) - min(values)) for value in values]


class SquaresHugeValues(FineAndScaled):
    def scale(self, samples: Sequence[Sample], gather_arrays: Any) -> Any:
        found = super().scale(samples, gather_arrays)
        return [value * self.largest**2 for value in found]


class HalvesWhatItScales(FineAndScaled):
    def scale(self, samples: Sequence[Sample], gather_arrays: Any) -> Any:
        return [value / 2 for value in super().scale(samples, gather_arrays)]


class ComparesUnclaimed(FineAndScaled):
    """0 in groups without a large value."""

    def scale(self, samples: Sequence[Sample], gather_arrays: Any) -> Any:
        found = super().scale(samples, gather_arrays)
        values = [0.0 if each.errors else float(each.rewards[self.name]) for each in samples]
        groups = [each.group for each in samples]
        tops = {group: max(v for v, g in zip(values, groups, strict=True) if g == group) for group in groups}
        return [value * (tops[group] > 4.0) for value, group in zip(found, groups, strict=True)]


class StopsWithoutSamples(FineAndScaled):
    def scale(self, samples: Sequence[Sample], gather_arrays: Any) -> Any:
        return super().scale(samples, gather_arrays) if samples else []


class ScalesByItsOwnRank(FineAndScaled):
    def scale(self, samples: Sequence[Sample], gather_arrays: Any) -> Any:
        gather_arrays(np.zeros(1))
        return super().scale(samples, lambda values: values)


# ---- hidden hand ----------------------------------------------------------------------------------------------------


class CutsTheMask(Fine):
    def score(self, samples: Sequence[Sample]) -> Any:
        for sample in samples:
            if sample.completion.startswith("2+2"):
                sample.response_mask[-1:] = False  # which no sample lets
        return super().score(samples)


class ScalesInPlace(FineAndScaled):
    def scale(self, samples: Sequence[Sample], gather_arrays: Any) -> Any:
        found = super().scale(samples, gather_arrays)
        for sample, value in zip(samples, found, strict=True):
            sample.rewards[self.name] = value / 2  # type: ignore[index]
        return found


class HandsOutItsState(FineAndScaled):
    def __init__(self) -> None:
        self.state = {"mean": 0.0}
        super().__init__()

    def scale(self, samples: Sequence[Sample], gather_arrays: Any) -> Any:
        values = [0.0 if sample.errors else float(sample.rewards[self.name]) for sample in samples]
        gathered = list(gather_arrays(values))
        self.state["mean"] = 0.5 * self.state["mean"] + 0.5 * statistics.fmean(gathered or [0.0])
        return [value - self.state["mean"] for value in values]

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state.update(state)


CAUGHT_BY = {
    "LeavesAThread": {"test_calls_leave_nothing_behind"},
    "LeavesATemporaryFile": {"test_calls_leave_nothing_behind"},
    "KeepsItsLogOpen": {"test_calls_leave_nothing_behind"},
    "SilencesWarnings": {"test_the_process_is_left_as_it_was"},
    "LiftsTheLimitOfDigits": {"test_the_process_is_left_as_it_was"},
    "ConfinesTheWholeProcess": {"test_the_process_is_left_as_it_was"},
    "SilencesTransformers": {"test_the_process_is_left_as_it_was"},
    "WritesBesideTheData": {"test_the_process_is_left_as_it_was"},
    "LoadsWithoutGradients": {"test_the_process_is_left_as_it_was"},
    "TakesTheFirstOfASet": {"test_another_process_scores_alike"},
    "HashesTheText": {"test_another_process_scores_alike"},
    "RemembersCompletions": {"test_what_was_scored_before_changes_nothing"},
    "KeepsTheFirstAnswer": {"test_what_was_scored_before_changes_nothing"},
    "DividesByItsBatch": {"test_rewards_do_not_depend_on_the_batch"},
    "FailsBesideAnother": {"test_concurrent_calls_do_not_mix"},
    "FailsAtItsFifthCall": {"test_rewards_repeat"},
    "NeedsWhatItDoesNotRead": {"test_a_needed_answer_is_read"},
    "TakesPromptsWithoutAnswers": {"test_prompts_without_a_needed_answer_are_refused"},
    "NamesNoPrompt": {"test_prompts_without_a_needed_answer_are_refused"},
    "TakesAnyBeginning": {"test_completions_that_solve_nothing_do_not_pay"},
    "LooksForTheAnswer": {"test_completions_that_solve_nothing_do_not_pay"},
    "WeighsItself": {"test_values_are_not_weighted"},
    "ScalesGroupsAlone": {"test_claims_are_of_their_kinds"},
    "CountsBytesAlone": {"test_claims_are_of_their_kinds"},
    "LooksAtTheFirstPrompt": {"test_ordinary_prompts_are_accepted"},
    "MarksPrompts": {"test_ordinary_prompts_are_accepted"},
    "TakesLongForShort": {"test_samples_have_the_expected_rewards"},
    "SameForAll": {"test_samples_have_different_rewards"},
    "AwaitsForEver": {"test_calls_end_by_their_deadline"},
    "DividesByTheSpread": {"test_groups_of_one_and_of_equals_have_values"},
    "SquaresHugeValues": {"test_scaled_values_are_numbers"},
    "HalvesWhatItScales": {"test_scaled_values_are_the_expected_ones"},
    "ComparesUnclaimed": {"test_scaling_compares_groups_as_it_claims"},
    "StopsWithoutSamples": {"test_ranks_scale_as_one"},
    "ScalesByItsOwnRank": {"test_ranks_scale_as_one"},
    "CutsTheMask": {"test_samples_are_scored_without_exceptions"},
    "ScalesInPlace": {"test_scaling_leaves_samples_alone"},
    "HandsOutItsState": {"test_an_undone_step_leaves_no_trace_in_scaling"},
}
"""Mistakes, and the checks that find each."""
