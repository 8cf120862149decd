"""What a reward is given and what it returns: copies of samples, and numbers or errors that are checked."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any, Final

from rlplug.errors import brief, encodable
from rlplug.interfaces.plain_values import MAX_REWARD, as_reward
from rlplug.timeouts import CallError
from rlplug.types import RewardError, Sample

LONGEST_MESSAGE: Final = 2000
"""Longest message of a :class:`RewardError` that a reward returns, in characters."""


def own_copy(sample: Sample) -> Sample:
    """Return a copy for one call of a reward: what the call changes in it reaches no other sample or reward."""
    prompt = sample.prompt
    own = dataclasses.replace(
        prompt,
        answer=copy.deepcopy(prompt.answer),
        metadata=copy.deepcopy(dict(prompt.metadata)),
        messages=[dict(message) for message in prompt.messages],
    )
    return dataclasses.replace(sample, prompt=own, rewards=dict(sample.rewards))


def read_scores(returned: Any, num_samples: int) -> list[float | RewardError]:
    """Return a number that can train, or an error, for each sample of a call.

    Args:
        returned: What :meth:`rlplug.interfaces.reward.Reward.score` returned; a generator is consumed here.
        num_samples: Number of samples in the call.

    Raises:
        CallError: It is not ``num_samples`` values.
    """
    if isinstance(returned, str | bytes | Mapping) or not hasattr(type(returned), "__iter__"):
        raise CallError(f"returned {brief(returned)}, not a list of numbers")
    values = list(itertools.islice(returned, num_samples + 1))
    if len(values) != num_samples:
        count = f"{len(values)}" if len(values) < num_samples else f"more than {num_samples}"
        raise CallError(f"returned {count} values for {num_samples} samples")
    return [_score(value) for value in values]


def _score(value: Any) -> float | RewardError:
    try:
        if isinstance(value, RewardError):
            kind, text = value.kind, encodable(str(value.message)[:LONGEST_MESSAGE])
            known = RewardError(text, kind if kind in ("late", "raised", "invalid") else "refused")
            return known if text else RewardError("returned a RewardError without a message", "invalid")
        return as_reward(value)
    except CallError as problem:
        return RewardError(f"returned {problem}", "invalid")


def weighted_sum(by_name: dict[str, float | RewardError], weights: Mapping[str, float]) -> float:
    """Return the sum that trains, or NaN when a reward failed, so that it cannot pass for a reward.

    A sum that is too large for float32 is an error of the reward with the largest part in it, in ``by_name``.
    """
    if any(isinstance(value, RewardError) for value in by_name.values()):
        return math.nan
    parts = {name: weights[name] * value for name, value in by_name.items() if not isinstance(value, RewardError)}
    total = math.fsum(parts.values())  # 0.7 + 0.2 + 0.1 is 1
    if abs(total) <= MAX_REWARD:
        return total
    largest = max(parts, key=lambda name: abs(parts[name]))
    by_name[largest] = RewardError(
        f"returned {by_name[largest]:g}, and with its weight {weights[largest]:g} the weighted sum of the rewards is "
        f"{total:g}, which is too large: float32 holds the squares of rewards up to {MAX_REWARD:g}",
        "invalid",
    )
    return math.nan
