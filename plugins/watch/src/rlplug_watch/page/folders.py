"""Run folders below a folder, by the names that the page gives them; nothing outside that folder is ever opened."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from aiohttp import web

from rlplug_watch.own_files import own_path
from rlplug_watch.report.run_data import METRICS_FILE, RUN_FILE

MAX_DEPTH: Final = 6
"""Largest number of folders between the folder that is watched and a run."""
SCAN_EVERY_S: Final = 1.0
"""Shortest time in seconds between two searches for run folders."""


class Runs:
    """Run folders below ``root``: those with a ``metrics.jsonl`` or a ``run.json``, at any depth up to ``MAX_DEPTH``.

    The id of a run is its path below ``root`` with slashes, such as ``quickstart/001``; where ``root`` is itself a run,
    its name. An id from a browser is looked up among those that the search found and never becomes a path. Links are
    not followed, neither to folders nor to files.

    Args:
        root: The folder; it may be absent, or become a folder later.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))
        self._found: dict[str, Path] = {}
        self._scanned = -SCAN_EVERY_S

    def all(self) -> Mapping[str, Path]:
        """Return the folder of each run by its id, in the order of the ids; searched again after a second."""
        now = time.monotonic()
        if now - self._scanned >= SCAN_EVERY_S:
            self._found = dict(sorted(self._scan()))
            self._scanned = now
        return self._found

    def folder(self, run_id: str) -> Path | None:
        """Return the folder of a run, or ``None`` for an id that no run has."""
        return self.all().get(run_id)

    def file(self, run_id: str, name: str) -> Path | None:
        """Return a file of a run, or ``None`` where none can be read, or a link leads to it.

        Args:
            run_id: Id of the run, from anywhere.
            name: Path of the file within the folder; the caller's own, never from a browser.
        """
        folder = self.folder(run_id)
        path = None if folder is None else own_path(folder, name)
        return path if path is not None and os.access(path, os.R_OK) else None

    def _scan(self) -> Iterator[tuple[str, Path]]:
        if _is_run(_names(self.root)):
            yield self.root.name, self.root
            return
        pending = [(self.root, 0)]
        while pending:
            folder, depth = pending.pop()
            for path in _folders(folder):
                if _is_run(_names(path)):
                    yield path.relative_to(self.root).as_posix(), path
                elif depth < MAX_DEPTH:
                    pending.append((path, depth + 1))


def _is_run(names: set[str]) -> bool:
    return METRICS_FILE in names or RUN_FILE in names


def _names(folder: Path) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries}
    except OSError:
        return set()


def _folders(folder: Path) -> list[Path]:
    """Return the folders in ``folder`` that are no links and that an address can name."""
    try:
        with os.scandir(folder) as entries:
            return [
                Path(e.path) for e in entries if e.name[0] != "." and e.is_dir(follow_symlinks=False) and _is_text(e)
            ]
    except OSError:
        return []


def _is_text(entry: os.DirEntry[str]) -> bool:
    try:
        entry.name.encode()
    except UnicodeEncodeError:  # bytes that are no UTF-8
        return False
    return True


RUNS: Final = web.AppKey("runs", Runs)
"""Key of the application's run folders: ``request.app[RUNS].folder(request.match_info["run"])``."""
