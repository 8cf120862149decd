"""Rewards whose values a training scales before their weight, and what its samples get by them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.process_state import watched
from rlplug.rewards.scores import read_scores, weighted_sum
from rlplug.timeouts import CallError
from rlplug.types import RewardError, Sample


class ScalingReward(Protocol):
    """What a :class:`~rlplug.interfaces.Reward` with ``scales`` has besides. Metrics and validation are not scaled.

    Its state, plain data that is equal on all ranks, is in checkpoints, and is restored when a step is undone.
    """

    name: str

    def scale(self, samples: Sequence[Sample], gather_arrays: Callable[[Any], Any]) -> Sequence[float]:
        """Return a finite number for each of this rank's samples, of whole groups by ascending group; may be none.

        Called on every rank, in each round of a step. Samples with ``errors`` count in nothing, and what it returns for
        them is not read. ``gather_arrays`` returns the concatenation of all ranks' arrays, and is collective.
        """

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def scaled_samples(
    rewards: Sequence[ScalingReward],
    weights: Mapping[str, float],
    samples: Sequence[Sample],
    gather_arrays: Callable[[Any], Any],
) -> list[Sample]:
    """Return the samples with ``scaled_reward``, or with an error where the sum cannot train. Collective.

    Raises:
        RunError: A reward did not return a number for each sample.
    """
    scaled: list[dict[str, float | RewardError]] = [dict(sample.rewards) for sample in samples]
    for reward in rewards:
        call = PluginCall(reward, "scale")
        with watched(call):
            returned = reward.scale(samples, gather_arrays)
        try:
            scores = read_scores(returned, len(samples))
        except CallError as problem:
            raise call.violation("return a number for each sample", str(problem)) from None
        for sample, by_name, score in zip(samples, scaled, scores, strict=True):
            by_name |= {} if sample.errors else {reward.name: score}
    found = []
    for sample, by_name in zip(samples, scaled, strict=True):
        total = weighted_sum(by_name, weights)  # of a sum that is too large, it puts the error in
        values = by_name if math.isnan(total) else sample.rewards
        found.append(dataclasses.replace(sample, scaled_reward=total, rewards=values))
    return found
