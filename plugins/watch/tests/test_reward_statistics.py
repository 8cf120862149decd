"""Ties, noise and kinds of failures of rewards, against counts by hand and the core's own messages."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from rlplug_watch.reward_statistics import KINDS, reward_statistics

from rlplug.rewards import FunctionReward, RewardRunner
from rlplug.types import Prompt, RewardError, Sample


def sample(group: int, completion: str, **rewards: Any) -> Sample:
    return Sample(
        Prompt("p", (1,), ""), group, (1, 2), (False, True), (0.0, 0.0), completion, "stop", 0, rewards=rewards
    )  # type: ignore[arg-type]


def test_ties_and_noise_are_within_prompts() -> None:
    """Of another prompt, equal values are no tie, and equal completions no noise."""
    lost = RewardError("lost")
    samples = [
        *(sample(0, text, judge=value) for text, value in (("a", 1.0), ("a", 3.0), ("b", 1.0), ("c", lost))),
        *(sample(1, text, judge=value) for text, value in (("a", 9.0), ("d", 9.0), ("d", 9.0))),
    ]
    found = reward_statistics(samples)
    assert found["reward/judge/ties"] == 4 / 6  # 1 of 3 pairs, and 3 of 3
    among_equal = ((1 - 2) ** 2 + (3 - 2) ** 2 + 0) / 2  # two "a" of the first prompt, two "d" of the second
    among_all = (np.square(np.array([1, 3, 1]) - 5 / 3).sum() + 0) / 4
    assert found["reward/judge/noise"] == pytest.approx(among_equal / among_all)


def test_a_reward_that_is_a_function_of_the_completion_is_not_noisy() -> None:
    samples = [sample(group, text, length=0.1 * len(text)) for group in (0, 1) for text in ("a", "abc", "abc", "ab")]
    assert reward_statistics(samples)["reward/length/noise"] == pytest.approx(0, abs=1e-20)
    equal = [sample(0, "a", always=0.1) for _ in range(3)]  # round-off is no variance
    assert reward_statistics(equal) == {"reward/always/ties": 1.0, **{f"reward_errors/{kind}": 0.0 for kind in KINDS}}
    different = [sample(0, text, length=len(text)) for text in ("a", "bb")]  # nothing to compare
    assert set(reward_statistics(different)) == {"reward/length/ties", *(f"reward_errors/{kind}" for kind in KINDS)}


def test_failures_have_the_kinds_that_the_core_found() -> None:
    """An error that the reward returns is refused, whatever its words are, unless it says another kind."""

    def late(completion: str) -> float:
        time.sleep(30 * (completion == "late"))
        return 1.0

    def fails(completion: str) -> Any:
        if completion == "raised":
            raise ValueError("odd (very)")
        values = {"invalid": "1.0", "many": float("nan"), "own": RewardError("no verdict", "late")}
        return (values | {"refused": RewardError("took longer than 3 s")}).get(completion, 1.0)

    samples = [sample(0, text) for text in (*KINDS, "many", "own", "fine", "fine")]
    rewards = [FunctionReward(late), FunctionReward(fails)]
    found = reward_statistics(RewardRunner(rewards, deadline_s=0.3).score(samples))
    assert [found[f"reward_errors/{kind}"] * 8 for kind in KINDS] == [2, 1, 2, 1]
