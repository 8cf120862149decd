"""The reward that calls a function, and the runner that calls any reward with a deadline."""

from typing import TYPE_CHECKING

from rlplug.late_names import late_names

if TYPE_CHECKING:
    from rlplug.rewards.function import FunctionReward
    from rlplug.rewards.runner import RewardRunner, start_rewards

__all__ = ["FunctionReward", "RewardRunner", "start_rewards"]
_MODULES = {"FunctionReward": "function", "RewardRunner": "runner", "start_rewards": "runner"}
__getattr__ = late_names(__name__, _MODULES)
