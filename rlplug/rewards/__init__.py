"""Built-in rewards, and the runner that calls any reward with a deadline."""

from typing import TYPE_CHECKING

from rlplug.late_names import late_names

if TYPE_CHECKING:
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
_MODULES = {"ExactMatch": "text", "FunctionReward": "function", "RegexFormat": "text"}
__getattr__ = late_names(__name__, _MODULES | dict.fromkeys(("RewardRunner", "start_rewards"), "runner"))
