"""Rewards that ask a language model: one completion at a time, in pairs, or a group at once."""

from rlplug_rewards.judges.comparisons import BestOfGroup, PairwiseJudge
from rlplug_rewards.judges.judge import Judge

__all__ = ["BestOfGroup", "Judge", "PairwiseJudge"]
