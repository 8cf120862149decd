"""Reader of a run's ``samples.jsonl`` for its report, which shows a few samples and counts the rest."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec

from rlplug.distributed.durable_files import own_file
from rlplug_watch.own_files import own_lines

SAMPLES_FILE: Final = "samples.jsonl"
NUM_SAMPLES: Final = 5


@dataclass(frozen=True)
class SampleRecord:
    """One line of ``samples.jsonl``."""

    step: int
    phase: str
    prompt_uid: str
    prompt: str
    completion: str
    answer: str
    """Reference answer as text; empty when the task has none."""
    reward: float | None
    rewards: Mapping[str, float | str]
    """Value of each reward function, or the text of its error, by name."""
    finish_reason: str
    num_tokens: int | None
    turns: Sequence[tuple[str, str]] = ()
    """Who spoke, and the text, where an environment has answered."""


@dataclass(frozen=True)
class RewardFailure:
    """One error message of a reward function, counted over the whole run."""

    reward: str
    message: str
    count: int
    first_step: int


@dataclass(frozen=True)
class SampleLog:
    """Summary of ``samples.jsonl``, which need not fit in memory.

    The late samples are those of the last quarter of the run or, if it has none, of the latest step that has any.
    """

    best: Sequence[SampleRecord] = ()
    """Late samples with the highest rewards."""
    worst: Sequence[SampleRecord] = ()
    """Late samples with the lowest rewards."""
    late_steps: Sequence[int] = ()
    """First and last step of the late samples; empty without any."""
    failures: tuple[RewardFailure, ...] = ()
    num_samples: int = 0


class Candidate(NamedTuple):
    """What a choice of samples needs of one; its texts stay in the file."""

    step: int
    prompt_uid: str
    reward: float | None
    offset: int
    """Of its line in the file, in bytes."""


class _Line(msgspec.Struct):
    """What is decoded of each line."""

    step: Any = None
    prompt_uid: Any = None
    reward: Any = None
    rewards: Any = None


_DECODER: Final = msgspec.json.Decoder(_Line)


def read_samples(path: Path | None, steps: Sequence[int], notes: list[str]) -> SampleLog:
    """Return the summary of a run's samples, and add a sentence to ``notes`` for what could not be read.

    Args:
        path: The file; ``None`` where the run has none of its own.
        steps: The run's, of which the last quarter is late.
        notes: Sentences for the report.
    """
    if path is None:
        notes.append(f"No {SAMPLES_FILE}: this run logged no samples.")
        return SampleLog()
    first_late = steps[0] + (steps[-1] - steps[0]) * 0.75 if steps else 0
    late: list[Candidate] = []
    latest: list[Candidate] = []
    failures: dict[tuple[str, str], list[int]] = {}
    num_samples = num_unreadable = 0
    with open(path, "rb", opener=own_file) as file:
        for offset, line in _lines(file):
            if line is None or (number := _number(line.step)) is None:
                num_unreadable += 1
                continue
            num_samples += 1
            step = int(number)
            candidate = Candidate(step, sys.intern(_text(line.prompt_uid)), _number(line.reward), offset)
            if step >= first_late:
                late.append(candidate)
            elif not latest or step >= latest[0].step:
                latest = [*(latest if latest and latest[0].step == step else []), candidate]
            for name, value in _rewards(line.rewards).items():
                if isinstance(value, str):
                    failures.setdefault((name, value), []).append(step)
        best, worst = ([_read(file, each.offset) for each in chosen] for chosen in best_and_worst(late or latest))
    if num_unreadable:
        notes.append(f"{num_unreadable} lines of {SAMPLES_FILE} are not samples (cut short?) and are left out.")
    if not num_samples:
        notes.append(f"{SAMPLES_FILE} holds no samples.")
    failed = [RewardFailure(name, text, len(at), min(at)) for (name, text), at in failures.items()]
    failed.sort(key=lambda failure: -failure.count)
    late_steps = [sample.step for sample in late or latest]
    ends = (min(late_steps), max(late_steps)) if late_steps else ()
    return SampleLog(best, worst, ends, tuple(failed), num_samples)


def best_and_worst(samples: Iterable[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Return the samples with the highest and those with the lowest rewards, with no sample in both.

    Rewards often tie (an exact match is 0 or 1): among equal ones, each prompt comes once before any comes again, and
    the latest step comes first.
    """
    scored = [sample for sample in samples if sample.reward is not None]
    count = min(NUM_SAMPLES, math.ceil(len(scored) / 2))
    best = _ordered(scored, 1)[:count]
    shown = set(map(id, best))
    return best, _ordered([sample for sample in scored if id(sample) not in shown], -1)[:count]


def _ordered(samples: Sequence[Candidate], sign: int) -> list[Candidate]:
    """Return ``samples`` sorted by ``sign * reward``, the highest first."""
    repeats: Counter[tuple[float | None, str]] = Counter()
    keyed = []
    for sample in sorted(samples, key=lambda sample: -sample.step):
        assert sample.reward is not None
        tie = (sample.reward, sample.prompt_uid)
        keyed.append((-sign * sample.reward, repeats[tie], sample))
        repeats[tie] += 1
    return [sample for _, _, sample in sorted(keyed, key=lambda item: item[:2])]


def _lines(file: BinaryIO) -> Iterator[tuple[int, _Line | None]]:
    """Yield the offset of each line that is not empty, and its fields, ``None`` for a line that is no object."""
    offset = 0
    for line in own_lines(file):
        if line.strip():
            yield offset, _decoded(line)
        offset += len(line)


def _decoded(line: bytes) -> _Line | None:
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # NaN, or half of a surrogate pair, which json.dumps writes and reads
        fields = _object(line)
        return None if fields is None else _Line(*(fields.get(name) for name in _Line.__struct_fields__))


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _read(file: BinaryIO, offset: int) -> SampleRecord:
    file.seek(offset)
    fields = _object(file.readline())
    assert fields is not None
    step, num_tokens = _number(fields.get("step")), _number(fields.get("num_tokens"))
    assert step is not None
    return SampleRecord(
        step=int(step),
        phase=_text(fields.get("phase")),
        prompt_uid=_text(fields.get("prompt_uid")),
        prompt=_text(fields.get("prompt")),
        completion=_text(fields.get("completion")),
        answer=_text(fields.get("answer")),
        reward=_number(fields.get("reward")),
        rewards=_rewards(fields.get("rewards")),
        finish_reason=_text(fields.get("finish_reason")),
        num_tokens=None if num_tokens is None else int(num_tokens),
        turns=_turns(fields.get("turns")),
    )


def _rewards(value: Any) -> dict[str, float | str]:
    return {str(name): _reward(each) for name, each in value.items()} if isinstance(value, dict) else {}


def _turns(value: Any) -> Sequence[tuple[str, str]]:
    parts = [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []
    return [(_text(part.get("role")), _text(part.get("text"))) for part in parts]


def _reward(value: Any) -> float | str:
    number = _number(value)
    if number is not None:
        return number
    # Messages that differ only in their tail (a path, an address) should count as the same failure.
    return _text(value.get("error") if isinstance(value, dict) else value)[:300] or "no value"


def _number(cell: Any) -> float | None:
    """Return ``cell`` as a finite number, or ``None``."""
    if cell is None or isinstance(cell, (bool, list, dict)):
        return None
    try:
        value = float(cell)
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
