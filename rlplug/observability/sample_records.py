"""Samples as lines of ``samples.jsonl``: which of a step are written, and what of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlplug.types import RewardError, Sample


def is_trained(record: dict[str, Any]) -> bool:
    """Return whether a line of ``samples.jsonl`` is one that each step has."""
    return record.get("phase") == "train"


def spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Return ``count`` samples spread evenly from worst to best, failed rewards first."""
    ordered = sorted(samples, key=lambda sample: (not sample.errors, sample.reward))
    if len(ordered) <= count:
        return ordered
    return [ordered[round(index * (len(ordered) - 1) / max(count - 1, 1))] for index in range(count)]


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
