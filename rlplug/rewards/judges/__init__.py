"""Rewards that ask a language model: one completion at a time, in pairs, or a group at once."""

from rlplug.rewards.judges.comparisons import BestOfGroup, PairwiseJudge
from rlplug.rewards.judges.judge import Judge

__all__ = ["BestOfGroup", "Judge", "PairwiseJudge"]
