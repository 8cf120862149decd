"""What a resumed run writes again: its rows after the checkpoint are removed, and later checkpoints set aside."""

from __future__ import annotations

import gzip
import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlplug.distributed.checkpoints.files import EXPORTED, FOLDER, list_checkpoints
from rlplug.distributed.durable_files import explained, replace_folder, replaced, sync, whole_record


def set_aside_after(run_dir: Path, step: int, files: Sequence[str]) -> Path | None:
    """Move the checkpoints after ``step`` to ``checkpoints/abandoned-1`` or the next number, with copies of ``files``.

    The run goes on from ``step`` then, and its newest checkpoint is the one that it wrote last.

    Args:
        run_dir: Folder of the run.
        step: Step of the checkpoint from which the run goes on.
        files: Names of files of the run folder whose later rows will be removed.

    Returns:
        The folder, or ``None`` where there is no such checkpoint.

    Raises:
        RunError: They cannot be moved.
    """
    later = [path for path in list_checkpoints(run_dir) if int(path.name.removeprefix("step-")) > step]
    if not later:
        return None
    with explained(run_dir / FOLDER):
        numbers = (run_dir / FOLDER / f"abandoned-{number}" for number in itertools.count(1))
        aside = next(path for path in numbers if not path.exists())
        aside.mkdir()
        for name in files:
            if (run_dir / name).is_file():
                shutil.copyfile(run_dir / name, aside / name)
        for path in later:
            path.rename(aside / path.name)
        sync(aside.parent)
    return aside


def set_exports_aside(run_dir: Path, step: int) -> list[str]:
    """Give ``policy/`` and ``adapter/``, exported after ``step``, names with the step, and return lines that say so."""
    said = []
    for folder in (path for name in EXPORTED if (path := run_dir / name).is_dir()):
        aside = folder.with_name(f"{folder.name}-step-{step:08d}")
        replace_folder(folder, aside)
        said.append(f"{folder} of step {step} is now {aside}")
    return said


def restore_lines(path: Path, kept: bytes) -> list[str]:
    """Write the lines again that a checkpoint keeps and their file has lost; return a sentence that says so.

    Args:
        path: The file, which may be absent.
        kept: Its lines up to the checkpoint, compressed.
    """
    lines = gzip.decompress(kept).splitlines(keepends=True)
    with explained(path):
        found = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        num_lost = len(lines) - len({*lines} & {*found})
        if num_lost:
            with replaced(path) as partial:
                partial.write_bytes(b"".join([*lines, *(line for line in found if line not in {*lines})]))
    return [f"{path}: {num_lost} rows that were lost are written again, from the checkpoint."] if num_lost else []


def cut_back_lines(
    path: Path,
    step: int,
    num_expected: Callable[[dict[str, Any]], bool] | None = None,
    is_repeated: Callable[[dict[str, Any]], bool] = lambda record: False,
) -> list[str]:
    """Remove the lines of a JSON-lines file after ``step``, and those that are torn; say which lines are lost.

    Lines that stay keep every byte.

    Args:
        path: File whose lines are objects with a whole number ``step``; it need not exist.
        step: Last step to keep.
        num_expected: Whether a line is one of those that every step from 1 has; by default no line is.
        is_repeated: Whether a line up to ``step`` is written again too.

    Returns:
        A sentence for each kind of line that is lost.
    """
    steps: set[int] = set()
    num_torn, is_changed = 0, False
    with explained(path):
        if path.exists():
            with path.open("rb") as file:
                for record in map(whole_record, file):
                    num_torn += record is None
                    is_changed |= record is None or record["step"] > step or is_repeated(record)
                    if record is not None and num_expected is not None and num_expected(record):
                        steps.add(record["step"])
    if is_changed:
        with replaced(path) as partial, path.open("rb") as file, partial.open("wb") as kept:
            for line in file:
                record = whole_record(line)
                if record is not None and record["step"] <= step and not is_repeated(record):
                    kept.write(line)
    return _losses(path, num_torn, set(range(1, step + 1)) - steps if num_expected is not None else set())


def cut_back_metrics(path: Path, step: int, repeats_scores: bool = False) -> list[str]:
    """Remove the lines of ``metrics.jsonl`` that a run which resumes after ``step`` writes again.

    Args:
        path: The file.
        step: Last step to keep.
        repeats_scores: Whether the scores of that step that came late are written again too.

    Returns:
        A sentence for each kind of line that is lost, as :func:`cut_back_lines`.
    """

    def is_late(record: dict[str, Any]) -> bool:
        return all(name == "step" or name.startswith("validate/") for name in record)

    def is_repeated(record: dict[str, Any]) -> bool:
        return repeats_scores and record["step"] == step and is_late(record)

    return cut_back_lines(path, step, lambda record: not is_late(record), is_repeated)


def _losses(path: Path, num_torn: int, missing: set[int]) -> list[str]:
    """Return a sentence about lines of ``path`` that were torn, and one about steps that have none."""
    said = []
    if num_torn:
        said.append(f"{path}: {num_torn} damaged line{'s were' if num_torn > 1 else ' was'} removed.")
    if missing:
        said.append(f"{path}: rows of step {_ranges(missing)} are missing, which the run cannot write again.")
    return said


def _ranges(steps: set[int]) -> str:
    """Return numbers as ``1-3, 7``."""
    starts = [step for step in sorted(steps) if step - 1 not in steps]
    ends = [step for step in sorted(steps) if step + 1 not in steps]
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return ", ".join(parts if len(parts) <= 8 else [*parts[:8], "..."])
