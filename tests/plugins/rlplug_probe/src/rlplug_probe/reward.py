"""A reward for saying it briefly."""

from __future__ import annotations

from collections.abc import Sequence

from rlplug.interfaces import Reward
from rlplug.types import RewardError, Sample


class ShortReward(Reward):
    """1 / number of tokens of the completion."""

    def score(self, samples: Sequence[Sample]) -> list[float | RewardError]:
        return [1 / sample.num_response_tokens for sample in samples]
