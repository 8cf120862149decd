"""Reward of a trained reward model: a sequence classifier with one label."""

from rlplug.rewards.reward_model.reward import RewardModel

__all__ = ["RewardModel"]
