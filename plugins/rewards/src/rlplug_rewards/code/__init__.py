"""Reward of tests that a completion's code passes, in the sandbox of tools."""

from rlplug_rewards.code.reward import CodeReward

__all__ = ["CodeReward"]
