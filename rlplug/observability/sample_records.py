"""Samples as lines of ``samples.jsonl``: which of a step are written, and what of each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlplug.distributed.durable_files import RowFile
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.types import RewardError, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROW: Final = np.dtype(
    [
        ("reward", np.float64),
        *((name, np.int64) for name in ("group", "rank", "index", "group_number", "place", "total_tokens")),
    ]
)
"""What every rank knows of a sample: its reward, -inf where one failed; its group, and the place of that among the
groups of the step; the rank that has it, and its index there; its place in the group; its tokens, prompt included."""
SampleRows: TypeAlias = NDArray[Any]
"""Structured array of ``ROW``."""


def is_trained(record: dict[str, Any]) -> bool:
    """Return whether a line of ``samples.jsonl`` is one that each step has."""
    return record.get("phase") == "train"


def sample_rows(samples: Sequence[Sample], ranks: RLFSDP2Strategy) -> SampleRows:
    """Return a row for each sample of all ranks, by ascending group. Collective."""
    mine = np.zeros(len(samples), ROW)
    for index, (row, sample) in enumerate(zip(mine, samples, strict=True)):
        row["reward"], row["group"] = -np.inf if sample.errors else sample.reward, sample.group
        row["rank"], row["index"], row["total_tokens"] = ranks.global_rank, index, len(sample.token_ids)
    rows = ranks.gather_arrays(mine)
    rows = rows[np.lexsort((rows["index"], rows["rank"], rows["group"]))]
    groups = rows["group"]
    rows["group_number"] = np.unique(groups, return_inverse=True)[1]
    rows["place"] = np.arange(len(rows)) - np.searchsorted(groups, groups)
    return rows


def spread(rows: SampleRows, count: int) -> SampleRows:
    """Return ``count`` rows, spread evenly from worst to best, failed rewards first."""
    rows = rows[np.lexsort((rows["place"], rows["group"], rows["reward"]))]
    if len(rows) > count:
        rows = rows[[round(index * (len(rows) - 1) / max(count - 1, 1)) for index in range(count)]]
    return rows


def gather_samples(
    rows: SampleRows, samples: Sequence[Sample], advantages: NDArray[Any] | None, ranks: RLFSDP2Strategy
) -> list[tuple[Sample, float | None]]:
    """Return the samples of ``rows``, in their order, each with its advantage. Only those travel. Collective.

    Args:
        rows: The same on all ranks.
        samples: This rank's samples.
        advantages: Their advantages [n], where each has one; ``None`` on all ranks or on none.
        ranks: Exchanges samples.
    """
    own = []
    for position, row in enumerate(rows):
        if row["rank"] == ranks.global_rank:
            advantage = None if advantages is None else float(advantages[row["index"]])
            own.append((position, samples[row["index"]], advantage))
    return [(sample, advantage) for _, sample, advantage in sorted(ranks.gather(own), key=lambda found: found[0])]


def first_of_ranks(samples: Sequence[Sample], count: int, ranks: RLFSDP2Strategy) -> list[Sample]:
    """Return the first ``count`` of all ranks' samples, by group. Collective."""
    return sorted(ranks.gather(list(samples[:count])), key=lambda sample: sample.group)[:count]


def with_turns(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """Return the sample with its ``turns``, if its environment has answered."""
    start = len(sample.prompt.token_ids)
    is_policy = sample.response_mask[start:]
    borders = np.flatnonzero(np.diff(is_policy)) + 1
    if not len(borders):
        return sample
    speakers = ["policy" if is_policy[place] else "environment" for place in (0, *borders)]
    pieces = [piece.tolist() for piece in np.split(sample.token_ids[start:], borders)]
    texts = tokenizer.batch_decode(pieces, skip_special_tokens=True)
    return dataclasses.replace(sample, turns=tuple(zip(speakers, texts, strict=True)))


def sample_record(
    sample: Sample, step: int, phase: str, row: Any = None, has_tokens: bool = False, advantage: float | None = None
) -> dict[str, Any]:
    """Return the line of ``samples.jsonl`` of a sample: plain values, but for an ``answer`` of any type.

    Args:
        sample: The sample.
        step: Number of the step.
        phase: ``train``, ``validate`` or ``reward_errors``.
        row: Its row among the samples of the step, with its group and its place there; ``None`` leaves both out.
        has_tokens: Whether its tokens are in the token log.
        advantage: Advantage of the whole completion; ``None`` where there is none, or tokens have their own.
    """
    rewards = {
        name: {"error": value.message, "kind": value.kind} if isinstance(value, RewardError) else value
        for name, value in sample.rewards.items()
    }
    return {
        "step": step,
        "phase": phase,
        "prompt_uid": sample.prompt.uid,
        "prompt": sample.prompt.text,
        "completion": sample.completion,
        **({"turns": [{"role": role, "text": text} for role, text in sample.turns]} if sample.turns else {}),
        "answer": sample.prompt.answer,
        "reward": None if sample.errors else sample.reward,
        "rewards": rewards,
        "finish_reason": sample.finish_reason,
        "num_tokens": sample.num_response_tokens,
        "num_turns": sample.num_turns,
        "policy_version": sample.policy_version,
        "advantage": None if advantage is None else float(f"{advantage:.5g}"),
        "group": None if row is None else int(row["group_number"]),
        "index": None if row is None else int(row["place"]),
        "has_tokens": has_tokens,
    }


def write_records(file: RowFile, records: Sequence[dict[str, Any]]) -> None:
    """Append the lines of some samples.

    Raises:
        RunError: The file cannot be written.
    """
    if records:
        file.append("".join(map(json_line, records)))


def json_line(record: dict[str, Any]) -> str:
    """Return a record as a line of JSON, with its ``answer`` as text where that has keys which JSON has not."""
    try:
        return json.dumps(record, default=str) + "\n"
    except (TypeError, ValueError):
        return json.dumps(record | {"answer": str(record["answer"])}, default=str) + "\n"
