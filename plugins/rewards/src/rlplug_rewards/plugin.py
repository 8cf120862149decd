"""The entry point: what this distribution registers. The classes are imported when a run names them."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry

RLPLUG_API_VERSION = ">=3,<4"


@hookimpl
def rlplug_register_rewards(registry: Registry) -> None:
    for place in (
        "rlplug_rewards.judges.comparisons:BestOfGroup",
        "rlplug_rewards.text:ExactMatch",
        "rlplug_rewards.scaling:EnvironmentReward",
        "rlplug_rewards.text:RegexFormat",
        "rlplug_rewards.code.reward:CodeReward",
        "rlplug_rewards.judges.judge:Judge",
        "rlplug_rewards.verifiers:MathVerify",
        "rlplug_rewards.choice:MultipleChoice",
        "rlplug_rewards.judges.comparisons:PairwiseJudge",
        "rlplug_rewards.verifiers:ReasoningGymReward",
        "rlplug_rewards.reward_model.remote:RemoteRewardModel",
        "rlplug_rewards.reward_model.reward:RewardModel",
        "rlplug_rewards.scaling:ScaledReward",
    ):
        registry.add("rewards", place)


@hookimpl
def rlplug_register_classes(registry: Registry) -> None:
    registry.add("classes", "rlplug_rewards.reasoning_gym:ReasoningGymSource")
