"""Samples as lines of ``samples.jsonl``: which of a step are written, and what of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.types import RewardError, Sample


def is_trained(record: dict[str, Any]) -> bool:
    """Return whether a line of ``samples.jsonl`` is one that each step has."""
    return record.get("phase") == "train"


def spread_over_ranks(samples: Sequence[Sample], count: int, ranks: RLFSDP2Strategy) -> list[Sample]:
    """Return ``count`` of all ranks' samples, spread evenly from worst to best, failed rewards first. Collective.

    Only those travel; to choose them, ranks tell each other rewards.
    """
    fields = [("reward", np.float64), ("group", np.int64), ("rank", np.int64), ("index", np.int64)]
    mine = np.zeros(len(samples), fields)
    for index, (row, sample) in enumerate(zip(mine, samples, strict=True)):
        row["reward"], row["group"] = -np.inf if sample.errors else sample.reward, sample.group
        row["rank"], row["index"] = ranks.global_rank, index
    rows = ranks.gather_arrays(mine)
    rows = rows[np.lexsort((rows["index"], rows["group"], rows["reward"]))]
    if len(rows) > count:
        rows = rows[[round(index * (len(rows) - 1) / max(count - 1, 1)) for index in range(count)]]
    own = [(position, samples[row["index"]]) for position, row in enumerate(rows) if row["rank"] == ranks.global_rank]
    return [sample for _, sample in sorted(ranks.gather(own), key=lambda pair: pair[0])]


def first_of_ranks(samples: Sequence[Sample], count: int, ranks: RLFSDP2Strategy) -> list[Sample]:
    """Return the first ``count`` of all ranks' samples, by group. Collective."""
    return sorted(ranks.gather(list(samples[:count])), key=lambda sample: sample.group)[:count]


def sample_record(sample: Sample, step: int, phase: str) -> dict[str, Any]:
    """Return the line of ``samples.jsonl`` of a sample: plain values, but for an ``answer`` of any type."""
    rewards = {
        name: {"error": value.message} if isinstance(value, RewardError) else value
        for name, value in sample.rewards.items()
    }
    return {
        "step": step,
        "phase": phase,
        "prompt_uid": sample.prompt.uid,
        "prompt": sample.prompt.text,
        "completion": sample.completion,
        "answer": sample.prompt.answer,
        "reward": None if sample.errors else sample.reward,
        "rewards": rewards,
        "finish_reason": sample.finish_reason,
        "num_tokens": sample.num_response_tokens,
    }
