"""One run that is watched: its status, its newest values and its page, read again where its files have changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from rlplug_watch.config_values import MAX_VALUE, flat_config, masked_config
from rlplug_watch.metrics_file import MetricsFile
from rlplug_watch.report.run_data import (
    CONFIG_FILE,
    METRICS_FILE,
    PROFILE_FILE,
    RUN_FILE,
    Metrics,
    RunData,
    read_config,
    read_info,
    read_profile,
    run_name,
)
from rlplug_watch.report.sample_log import SampleLog
from rlplug_watch.report.timeline import FILE as TIMELINE_FILE
from rlplug_watch.report.timeline import NEWEST, ChosenSteps
from rlplug_watch.run_state import with_state

T = TypeVar("T")
Opener = Callable[[str], Path | None]


class FileCache(Generic[T]):
    """A value that is read from a file, again when the file's inode, size or time of change is another."""

    def __init__(self, read: Callable[[Path | None], T]) -> None:
        self._read = read
        self._key: tuple[int, ...] | None = None
        self._value: T | None = None

    def get(self, path: Path | None) -> T:
        """Return the value of a file; of none, what reading ``None`` gives."""
        key = file_key(path)
        if self._value is None or key != self._key:
            self._value, self._key = self._read(path), key
        return self._value


def file_key(path: Path | None) -> tuple[int, ...]:
    """Return what changes with a file: inode, size and time of change; nothing for a file that is absent."""
    try:
        stat = os.stat(path) if path is not None else None
    except OSError:
        stat = None
    return () if stat is None else (stat.st_ino, stat.st_size, stat.st_mtime_ns)


class WatchedRun:
    """Files of a run, read when they are asked for.

    Args:
        folder: Folder of the run.
        opener: Function that returns the path of a file of the run by its name, if it may be read.
    """

    def __init__(self, folder: Path, opener: Opener) -> None:
        self.folder = folder
        self._path = opener
        self.metrics = MetricsFile(lambda: opener(METRICS_FILE))
        self._info = FileCache[Mapping[str, Any]](lambda path: read_info(path, []))
        self._config = FileCache[Mapping[str, str]](flat_config)
        self._shown = FileCache[str](lambda path: masked_config(read_config(path, [])))
        self._latest = FileCache[Mapping[str, float]](lambda path: self.metrics.latest(RARE))

    def version(self) -> str:
        """Return a text that changes when the run has written anything that its page shows."""
        keys = [file_key(self._path(name)) for name in (METRICS_FILE, RUN_FILE, CONFIG_FILE, TIMELINE_FILE)]
        return f"{hash((*keys, self.status())) & (2**64 - 1):x}"

    def info(self) -> Mapping[str, Any]:
        """Return ``run.json``, with a status that is true now."""
        return with_state(self._info.get(self._path(RUN_FILE)), self.folder)

    def status(self) -> str:
        return str(self.info().get("status") or "unknown")

    def config(self) -> Mapping[str, str]:
        """Return the values of the configuration as text, by keys with dots."""
        return self._config.get(self._path(CONFIG_FILE))

    def samples_per_step(self) -> int | None:
        """Return the number of completions of a step, if the configuration says it."""
        sizes = [self._size(f"model.batch.{name}") for name in ("prompts_per_step", "group_size")]
        return None if sizes[0] is None or sizes[1] is None else sizes[0] * sizes[1]

    def _size(self, key: str) -> int | None:
        text = self.config().get(key, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None

    def summary(self) -> dict[str, Any]:
        """Return the row of the run in the list of runs."""
        info, path = self.info(), self._path(METRICS_FILE)
        latest = self._latest.get(path)
        try:
            updated = path.stat().st_mtime if path is not None else None
        except OSError:
            updated = None
        return {
            "name": run_name(self.folder),
            "status": str(info.get("status") or "unknown")[:40],
            "message": str(info.get("message") or "")[:MAX_VALUE],
            "started": str(info.get("started") or "")[:40],
            "updated": updated,
            "num_steps": self._size("model.num_steps"),
            "latest": {label: latest.get(column) for label, column in LATEST.items()},
            "version": self.version(),
        }

    def data(self, steps: ChosenSteps = NEWEST) -> RunData:
        """Return what the page of the run shows, without its samples; ``steps`` have timelines."""
        notes: list[str] = []
        config, profile = self._path(CONFIG_FILE), self._path(PROFILE_FILE)
        if self._path(RUN_FILE) is None:
            notes.append(f"No {RUN_FILE}: status, batch plan, versions and plugins are unknown.")
        return RunData(
            name=run_name(self.folder),
            metrics=Metrics.of(self.metrics),
            samples=SampleLog(),
            info=self.info(),
            config=self._shown.get(config),
            profile=read_profile(profile) if profile is not None else "",
            notes=tuple(notes),
            timelines=steps.read(self._path(TIMELINE_FILE)),
            options=self._config.get(config),
        )


LATEST: Final = {
    "step": "step",
    "reward": "reward/mean",
    "pass1": "validate/pass@1",
    "length": "completion/length_mean",
    "tokens_per_s": "throughput/tokens_per_s",
    "step_s": "time/step",
    "staleness": "partial/staleness_mean",
}
"""Columns of the list of runs, and the metrics whose newest values they show."""
RARE: Final = ("validate/pass@1",)
"""Those that many steps lack."""
