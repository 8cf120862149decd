"""Rewards of a trained reward model, a sequence classifier with one label: in this process, or behind a server."""

from rlplug_rewards.reward_model.remote import RemoteRewardModel
from rlplug_rewards.reward_model.reward import RewardModel

__all__ = ["RemoteRewardModel", "RewardModel"]
