"""Options of a curriculum by pass rate: prompts that are always or never solved are drawn less often."""

from __future__ import annotations

from dataclasses import dataclass

from rlplug.errors import ConfigError
from rlplug.types.ranges import PositiveShare, RewardValue, Share, check_ranges


@dataclass
class PassRateCurriculum:
    """Draws prompts whose pass rate is in a window, and others less often.

    The pass rate of a prompt is a moving average over its groups of this run. A group whose completions all pass, or
    all fail, has no advantages in GRPO and its kin; the lower bound of an update's improvement grows with the variance
    of success, ``p (1 - p)`` (arXiv 2504.03380, arXiv 2502.12272).

    Args:
        low: Smallest pass rate in the window.
        high: Largest pass rate in the window.
        outside: Chance of a prompt outside the window to be drawn when its turn comes, above 0: so its pass rate is
            measured again. A prompt without a pass rate is always drawn.
        smoothing: Weight of a prompt's newest group in its pass rate; 1 forgets the ones before.
        pass_threshold: A completion passes when its reward is at least this.
    """

    low: Share = 0.1
    high: Share = 0.9
    outside: PositiveShare = 0.2
    smoothing: PositiveShare = 0.5
    pass_threshold: RewardValue = 1.0

    def __post_init__(self) -> None:
        check_ranges(self, "data.curriculum")
        if self.low > self.high:
            raise ConfigError(
                f"data.curriculum.low is {self.low} and data.curriculum.high {self.high}: give 0 <= low <= high <= 1."
            )
