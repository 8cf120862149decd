"""An index of ``samples.jsonl``: where each line is, and the few numbers by which samples are chosen and sorted.

A file of a gigabyte is neither kept in memory nor searched within one request: the index grows by what a second allows,
and so does a search of texts.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

MAX_LINE: Final = 8 << 20
"""Longest line that is read, in bytes."""
CHUNK: Final = 1 << 20
LARGEST: Final = 1 << 31
"""Whole numbers of a sample are smaller."""
AT_ONCE: Final = 256
"""Samples whose texts are searched between two looks at the clock."""
PHASES: Final = ("train", "validate")
FINISHES: Final = ("stop", "length", "abort")
LINE: Final = np.dtype(
    [
        *((name, np.int64) for name in ("offset", "length", "step", "num_tokens")),
        *((name, np.int32) for name in ("group", "index")),
        *((name, np.float64) for name in ("reward", "advantage")),
        *((name, np.int8) for name in ("phase", "finish")),
        *((name, np.bool_) for name in ("has_errors", "has_tokens")),
    ]
)
"""What the index knows of a line. A NaN, and -1 of ``group``, ``index``, ``phase`` and ``finish``, is not there."""


@dataclass
class SampleLine:
    """A line of ``samples.jsonl``; lines of former versions lack the fields at the end."""

    step: int
    phase: str
    prompt_uid: str
    prompt: str
    completion: str
    reward: float | None
    rewards: dict[str, Any]
    finish_reason: str
    num_tokens: int
    answer: Any = None
    num_turns: int | None = None
    policy_version: int | None = None
    advantage: float | None = None
    group: int | None = None
    index: int | None = None
    has_tokens: bool = False
    turns: list[dict[str, str]] = field(default_factory=list)
    """Who spoke, as ``role``, and the ``text``, where an environment has answered."""

    @property
    def errors(self) -> dict[str, str]:
        """Messages of the rewards that failed, by name."""
        failed = {name: value for name, value in self.rewards.items() if isinstance(value, dict)}
        return {name: str(value.get("error", "")) for name, value in failed.items()}

    @property
    def answer_text(self) -> str | None:
        """The reference answer as text: JSON where it is none; ``None`` without one."""
        is_text = self.answer is None or isinstance(self.answer, str)
        return self.answer if is_text else json.dumps(self.answer, ensure_ascii=False)


_DECODER: Final = msgspec.json.Decoder(SampleLine)


def read_line(line: bytes) -> SampleLine | None:
    """Return the sample of a line, or ``None`` for a line that is none."""
    try:
        sample = _DECODER.decode(line)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # NaN, or half of a surrogate pair, which json.dumps writes and reads
        try:
            sample = msgspec.convert(json.loads(line), SampleLine)
        except (ValueError, RecursionError, OverflowError, msgspec.ValidationError):
            return None
    return sample if abs(sample.step) < LARGEST else None


class SampleIndex:
    """Lines of a ``samples.jsonl``, read as far as :meth:`grow` has come. Threads take turns.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self._identity: tuple[int, int] | None = None
        self._clear()

    def _clear(self) -> None:
        self._rows = np.zeros(1024, LINE)
        self._num_rows = 0
        self.num_bytes_read = self.num_bytes = 0
        self.num_unreadable = 0

    @property
    def rows(self) -> NDArray[Any]:
        """Structured array of ``LINE``, in the order of the file."""
        return self._rows[: self._num_rows]

    @property
    def is_complete(self) -> bool:
        return self.num_bytes_read >= self.num_bytes

    def grow(self, seconds: float) -> None:
        """Read lines that are new, for about as long as given; begin again where the file is another one or shorter.

        Raises:
            OSError: The file cannot be read.
        """
        deadline = time.monotonic() + seconds
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            identity = status.st_dev, status.st_ino  # of a resumed run the file is a new one, without later steps
            if identity != self._identity or status.st_size < self.num_bytes_read:
                self._clear()
                self._identity = identity
            self.num_bytes = status.st_size
            file.seek(self.num_bytes_read)
            while self.num_bytes_read < self.num_bytes and time.monotonic() < deadline:
                line = file.readline(MAX_LINE)
                if not line.endswith(b"\n"):
                    if len(line) < MAX_LINE:  # the end of a line that is still written
                        self.num_bytes = self.num_bytes_read
                        break
                    length = len(line) + _skip_line(file, deadline)
                    self.num_unreadable += 1
                else:
                    length = len(line)
                    self._add(self.num_bytes_read, line)
                self.num_bytes_read += length

    def _add(self, offset: int, line: bytes) -> None:
        sample = read_line(line)
        if sample is None:
            self.num_unreadable += 1
            return
        if self._num_rows == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros(len(self._rows), LINE)])
        row = self._rows[self._num_rows]
        self._num_rows += 1
        row["offset"], row["length"] = offset, len(line)
        row["step"], row["num_tokens"] = _small(sample.step), _small(sample.num_tokens)
        row["group"], row["index"] = _small(sample.group, -1), _small(sample.index, -1)
        row["reward"] = math.nan if sample.reward is None else sample.reward
        row["advantage"] = math.nan if sample.advantage is None else sample.advantage
        row["phase"] = PHASES.index(sample.phase) if sample.phase in PHASES else -1
        row["finish"] = FINISHES.index(sample.finish_reason) if sample.finish_reason in FINISHES else -1
        row["has_errors"], row["has_tokens"] = bool(sample.errors), sample.has_tokens

    def samples(self, numbers: NDArray[np.int64], part: bytes = b"") -> Iterator[tuple[int, SampleLine]]:
        """Yield lines by their number in ``rows``; those that are no longer there are left out.

        Args:
            numbers: Of the lines.
            part: Bytes in lower case without which a line is left out before it is parsed.

        Raises:
            OSError: The file cannot be read.
        """
        with self.path.open("rb") as file:
            for number in numbers.tolist():
                row = self._rows[number]
                file.seek(int(row["offset"]))
                line = file.read(int(row["length"]))
                sample = read_line(line) if part in line.lower() else None
                if sample is not None and sample.step == row["step"]:
                    yield number, sample


def _small(value: int | None, absent: int = 0) -> int:
    """Return a number that fits the index."""
    return absent if value is None else max(-LARGEST, min(value, LARGEST - 1))


def _skip_line(file: Any, deadline: float) -> int:
    """Read to the end of a line, or until it is late, and return how many bytes that were."""
    length = 0
    while time.monotonic() < deadline and (part := file.readline(CHUNK)):
        length += len(part)
        if part.endswith(b"\n"):
            break
    return length


# ---- choosing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleFilter:
    """Which samples are wanted; ``None`` and an empty text want all."""

    text: str = ""
    """Within prompt, completion, answer or name of the prompt, in any case of letters."""
    phase: str | None = None
    finish: str | None = None
    first_step: int | None = None
    last_step: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    group: int | None = None
    uid: str | None = None
    """Name of the prompt."""
    only_errors: bool = False
    only_tokens: bool = False

    def choose(self, rows: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which rows of an index are wanted, but for what only their texts tell."""
        wanted = np.ones(len(rows), np.bool_)
        if self.phase is not None:
            wanted &= rows["phase"] == (PHASES.index(self.phase) if self.phase in PHASES else -2)
        if self.finish is not None:
            wanted &= rows["finish"] == (FINISHES.index(self.finish) if self.finish in FINISHES else -2)
        if self.group is not None:
            wanted &= rows["group"] == self.group
        for limit, name, is_wanted in (
            (self.first_step, "step", np.greater_equal),
            (self.last_step, "step", np.less_equal),
            (self.reward_min, "reward", np.greater_equal),
            (self.reward_max, "reward", np.less_equal),
        ):
            if limit is not None:
                wanted &= is_wanted(rows[name], limit)
        if self.only_errors:
            wanted &= rows["has_errors"]
        if self.only_tokens:
            wanted &= rows["has_tokens"]
        return wanted

    @property
    def reads_texts(self) -> bool:
        return bool(self.text) or self.uid is not None

    @property
    def part(self) -> bytes:
        """Bytes in lower case that each line with the text has: its longest run of what JSON does not escape.

        None of a text beyond ASCII: there, letters have several forms.
        """
        runs = re.findall(r"[ !#-\[\]-~]+", self.text) if self.text.isascii() else []
        return max(runs, key=len, default="").lower().encode()

    def fits(self, sample: SampleLine) -> bool:
        """Return whether the texts of a sample are wanted."""
        if self.uid is not None and sample.prompt_uid != self.uid:
            return False
        wanted = self.text.casefold()
        texts = (sample.completion, sample.prompt, sample.answer_text or "", sample.prompt_uid)
        return not wanted or any(wanted in text.casefold() for text in texts)


SORTS: Final = ("newest", "oldest", "reward", "-reward", "-advantage", "advantage", "-num_tokens", "num_tokens")


def sorted_numbers(rows: NDArray[Any], wanted: NDArray[np.bool_], sort: str) -> NDArray[np.int64]:
    """Return the numbers of the rows that are wanted, in the order of ``sort``; NaN comes last."""
    numbers = np.flatnonzero(wanted)
    if sort in ("newest", "oldest"):
        keys = rows["step"][numbers] * (-1 if sort == "newest" else 1)
    else:
        keys = rows[sort.removeprefix("-")][numbers].astype(np.float64) * (-1 if sort.startswith("-") else 1)
    found: NDArray[np.int64] = numbers[np.argsort(keys, kind="stable")]
    return found


@dataclass
class Found:
    """A page of samples."""

    samples: list[tuple[int, SampleLine]]
    """Each with its number in the index."""
    num_searched: int
    num_candidates: int
    """Samples that fit but for their texts, which were searched as far as the time allowed."""
    next: int
    """Candidates to skip in the next search, which goes on where this one ended."""


def search(index: SampleIndex, wanted: SampleFilter, sort: str, start: int, limit: int, seconds: float) -> Found:
    """Return up to ``limit`` samples from the candidate ``start`` on.

    Args:
        index: Of the file.
        wanted: Which samples.
        sort: One of ``SORTS``.
        start: Number of candidates to leave out.
        limit: Most samples.
        seconds: Time for reading texts.

    Raises:
        OSError: The file cannot be read.
    """
    rows = index.rows
    numbers = sorted_numbers(rows, wanted.choose(rows), sort)
    if not wanted.reads_texts:
        end = min(len(numbers), start + limit)
        return Found(list(index.samples(numbers[start:end])), end - start, len(numbers), end)
    deadline, found = time.monotonic() + seconds, []
    for begin in range(start, len(numbers), AT_ONCE):
        part = numbers[begin : begin + AT_ONCE]
        for number, sample in index.samples(part, wanted.part):
            if wanted.fits(sample):
                found.append((number, sample))
                if len(found) == limit:
                    end = begin + int(np.flatnonzero(part == number)[0]) + 1
                    return Found(found, end - start, len(numbers), end)
        if time.monotonic() > deadline and begin + AT_ONCE < len(numbers):
            return Found(found, begin + AT_ONCE - start, len(numbers), begin + AT_ONCE)
    return Found(found, max(0, len(numbers) - start), len(numbers), len(numbers))
