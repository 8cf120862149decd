"""A run's own files, read as a stranger's: none that a link leads to, regular files alone, and bounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from rlplug.distributed.durable_files import own_bytes

MAX_TEXT_BYTES: Final = 1 << 24
"""Most that is read of a file as one text."""
MAX_LINE_BYTES: Final = 1 << 26
"""Longest line that is read."""


def own_path(folder: Path, name: str) -> Path | None:
    """Return the path of a run's own file, or ``None`` where it has none.

    A link is none, nor is what is in a folder that is one: it may lead to any file of the reader, whose text would go
    into a page that is passed on. Pipes and devices are none either.

    Args:
        folder: The run's folder, which a link may lead to.
        name: Path of the file within it; the caller's own, never from a browser.
    """
    path = folder / name
    try:
        is_own = path.is_file() and path.resolve() == folder.resolve() / name
    except (OSError, RuntimeError):  # a loop of links
        return None
    return path if is_own else None


def own_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield lines up to one that is longer than any row: a file of zeros takes no disk, and hours to be read."""
    while line := file.readline(MAX_LINE_BYTES):
        yield line
        if len(line) == MAX_LINE_BYTES:
            return


def own_text(path: Path, most_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return a run's own file as text; bytes that are no UTF-8 are replaced.

    Raises:
        OSError: It cannot be read, or is no regular file.
        ValueError: It is larger than ``most_bytes``.
    """
    return own_bytes(path, most_bytes).decode(errors="replace")
