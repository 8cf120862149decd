"""Kinds of plugins that ``rlplug new-plugin`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Kind:
    """What the templates of a kind need to know. Texts may have the names of ``Names`` in double angle brackets."""

    title: str
    """Such as "an algorithm"."""
    summary: str
    """One sentence about the plugin, without its full stop: the package's description."""
    evidence: str
    """Python expression that is true of a ``TinyRun`` named ``run`` in which the plugin took part."""


KINDS: Final[Mapping[str, Kind]] = {
    "engine": Kind(
        "a rollout engine",
        "A rollout engine whose servers are processes of this host",
        'run.record["status"] == "finished"',
    ),
    "algorithm": Kind(
        "an algorithm",
        "REINFORCE with a leave-one-out baseline",
        '"policy/capped_share" in run.metrics[1]',
    ),
    "reward": Kind(
        "a reward",
        "A reward for completions that are not too long",
        '"reward/<< class_name | lower >>" in run.metrics[1]',
    ),
    "environment": Kind(
        "an environment",
        "A game of several turns: find a letter",
        '"environment/is_letter" in run.metrics[1]',
    ),
    "optimization": Kind(
        "an optimization",
        "Trains without the first blocks of the policy",
        'any("froze the embeddings and 1 blocks" in effect for effect in run.record["effects"])',
    ),
    "trainer": Kind(
        "a trainer",
        "Trains Llamas that are plain torch modules",
        'any("plain torch modules" in effect for effect in run.record["effects"])',
    ),
    "hooks": Kind(
        "hooks",
        "Counts finished completions, and limits the advantages that train",
        '"<< name >>/finished_share" in run.metrics[1]',
    ),
}
