"""Built-in rewards, and the runner that calls any reward with a deadline."""

from rlplug.rewards.code import CodeReward
from rlplug.rewards.function import FunctionReward
from rlplug.rewards.judges import BestOfGroup, Judge, PairwiseJudge
from rlplug.rewards.reward_model import RemoteRewardModel, RewardModel
from rlplug.rewards.runner import RewardRunner, start_rewards
from rlplug.rewards.text import ExactMatch, RegexFormat
from rlplug.rewards.verifiers import MathVerify, ReasoningGymReward

__all__ = [
    "BestOfGroup",
    "CodeReward",
    "ExactMatch",
    "FunctionReward",
    "Judge",
    "MathVerify",
    "PairwiseJudge",
    "ReasoningGymReward",
    "RegexFormat",
    "RemoteRewardModel",
    "RewardModel",
    "RewardRunner",
    "start_rewards",
]
