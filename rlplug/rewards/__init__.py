"""Built-in rewards, and the runner that calls any reward with a deadline."""

from rlplug.rewards.function import FunctionReward
from rlplug.rewards.runner import RewardRunner, start_rewards
from rlplug.rewards.text import ExactMatch, RegexFormat

__all__ = [
    "ExactMatch",
    "FunctionReward",
    "RegexFormat",
    "RewardRunner",
    "start_rewards",
]
