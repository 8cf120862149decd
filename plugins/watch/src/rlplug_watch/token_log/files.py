"""Files of the token log: steps are appended to files of some MiB, whole or not at all, and the oldest files go.

A file is ``tokens/step-00000001.tokens``, by its first step, and holds records. A record is a header of 32 bytes, and
the compressed safetensors of a step: see :func:`rlplug_watch.token_log.step_tokens.encode`.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from rlplug.distributed.durable_files import RowFile, explained, sync
from rlplug_watch.token_log.step_tokens import LARGEST, StepTokens, encode

FOLDER: Final = "tokens"
MAGIC: Final = b"RLPLUGTK"
HEADER: Final = struct.Struct("<8sQIIQ")
"""``MAGIC``; the step; bytes that follow; bytes that they are when decompressed; XXH3 of 64 bits of the last three and
what follows."""
FILE_BYTES: Final = 16 << 20
"""Size at which the next step begins a new file."""
_NAME: Final = re.compile(r"step-(\d{8,})\.tokens")
_NUMBERS: Final = struct.Struct("<QII")


@dataclass(frozen=True)
class Record:
    """Where the tokens of a step are."""

    step: int
    path: Path
    start: int
    """Offset of the header in the file."""
    size: int
    """Bytes after the header."""
    num_bytes: int
    """Bytes after decompression."""
    checksum: int

    @property
    def end(self) -> int:
        return self.start + HEADER.size + self.size


def token_files(folder: Path) -> list[Path]:
    """Return the files of a token log, oldest steps first."""
    found = [(int(match[1]), path) for path in folder.glob("*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def scan(path: Path, start: int = 0) -> tuple[list[Record], list[str]]:
    """Read the headers of a file from offset ``start``; return the whole records, and what is wrong with the rest.

    Raises:
        OSError: The file cannot be read.
    """
    records, problems = [], []
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while start < size:
            record = _record(path, file, start, size)
            if record is not None:
                records.append(record)
                start = record.end
                continue
            after = _next_magic(file, start + 1, size)
            problems.append(f"{path.name}: {after - start} bytes at {start} are no whole record")
            start = after
    return records, problems


def _record(path: Path, file: Any, start: int, size: int) -> Record | None:
    file.seek(start)
    header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        return None
    _, step, num_stored, num_bytes, checksum = HEADER.unpack(header)
    record = Record(step, path, start, num_stored, num_bytes, checksum)
    return record if record.end <= size and num_bytes <= LARGEST else None


def _next_magic(file: Any, start: int, size: int) -> int:
    """Return the offset of the next header at ``start`` or later, or the file's size."""
    chunk, overlap = 1 << 20, len(MAGIC) - 1
    while start < size:
        file.seek(start)
        found = file.read(chunk + overlap).find(MAGIC)
        if found >= 0:
            return int(start + found)
        start += chunk
    return size


def checksum(step: int, data: bytes, num_bytes: int) -> int:
    """Return the checksum of a record: its step, its bytes, and their number after decompression."""
    return xxhash.xxh3_64_intdigest(_NUMBERS.pack(step, len(data), num_bytes) + data)


class TokenLogWriter:
    """Appends steps to the token log, and removes its oldest files beyond a size.

    Args:
        folder: The run's ``tokens`` folder, made at the first step.
        max_bytes: Size of all files, beyond which the oldest is removed; the newest always stays.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._file: RowFile | None = None
        self._size = 0

    def append(self, tokens: StepTokens) -> None:
        """Add the tokens of a step, or nothing of them.

        Raises:
            RunError: The file cannot be written.
        """
        data, num_bytes = encode(tokens)
        header = HEADER.pack(MAGIC, tokens.step, len(data), num_bytes, checksum(tokens.step, data, num_bytes))
        file = self._file
        if file is None or self._size >= FILE_BYTES:
            file = self._next_file(tokens.step)
        file.append(header + data)
        self._size += len(header) + len(data)

    def sync(self) -> None:
        """Wait until all records are on the disk.

        Raises:
            RunError: The file cannot be written.
        """
        if self._file is not None:
            self._file.sync()

    def _next_file(self, step: int) -> RowFile:
        """Begin a file, or go on with the newest one of a run that is resumed; remove old ones."""
        with explained(self.folder):
            self.folder.mkdir(exist_ok=True)
            files = token_files(self.folder)
            newest = files[-1] if self._file is None and files else None
            self.sync()
            if newest is None or newest.stat().st_size >= FILE_BYTES:
                newest = self.folder / f"step-{step:08d}.tokens"
                newest.touch()
                sync(self.folder)
                self._remove_oldest([*files, newest])
            self._file, self._size = RowFile(newest), newest.stat().st_size
        return self._file

    def _remove_oldest(self, files: list[Path]) -> None:
        total = sum(path.stat().st_size for path in files) + FILE_BYTES  # the newest one will have
        for path in files[:-1]:
            if total <= self._max_bytes:
                break
            total -= path.stat().st_size
            path.unlink()


def cut_back(folder: Path, step: int, aside: Path | None) -> list[str]:
    """Remove the records after ``step``, and what is no whole record at the end; say what is damaged.

    Args:
        folder: The run's ``tokens`` folder; it need not exist.
        step: Last step to keep.
        aside: Folder that gets a copy of each file that changes, or ``None``.

    Returns:
        A sentence for each damaged place.

    Raises:
        RunError: A file cannot be read or written.
    """
    said = []
    for path in token_files(folder):
        with explained(path):
            records, problems = scan(path)
            kept = [record for record in records if record.step <= step]
            said += [f"{folder / problem}." for problem in problems]
            end = kept[-1].end if kept else 0
            if end == path.stat().st_size:
                continue
            if aside is not None:
                (aside / FOLDER).mkdir(exist_ok=True)
                shutil.copyfile(path, aside / FOLDER / path.name)
            if kept:
                os.truncate(path, end)
                sync(path)
            else:
                path.unlink()
    return said
