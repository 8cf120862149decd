"""What Prometheus scrapes: the newest value of each metric, and counters that no resume sets back."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lightning.pytorch.utilities import rank_zero_warn
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rlplug.distributed.durable_files import write_file
from rlplug.errors import RunError
from rlplug.types import GIB
from rlplug_watch.loggers import prometheus_names as names

COUNTS: Final = (*(name for name in names.COUNTERS if name != "errors"), *names.ERROR_KINDS)
"""Keys of the file of counters."""
OF_ENVIRONMENT: Final = "reward/environment/error_share"


class RunCounters:
    """Counts of steps, tokens, samples and errors, which a file keeps for a run that is resumed.

    The file is replaced before counts are served and when the run ends, not in each step, so no count that Prometheus
    has seen is taken back. A kill loses those since the last scrape; a power cut may lose the newest writes, which
    Prometheus takes as the restart of a counter.

    Args:
        path: The file; nothing is written before there is something to count.
    """

    def __init__(self, path: Path) -> None:
        self._path: Path | None = path
        self._lock = threading.Lock()
        self.values = self._saved = _read(path)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Count a step, given its metrics; values that are not finite count nothing."""
        num_samples = _count(metrics, "completion/num_samples")
        failed, of_environment = (
            round(num_samples * min(1.0, _finite(metrics, name))) for name in ("reward/error_share", OF_ENVIRONMENT)
        )
        new = {
            "steps": 1,
            "tokens": _count(metrics, "completion/num_tokens"),
            "samples": num_samples,
            "reward": max(0, failed - of_environment),
            "environment": of_environment,
            "skipped_update": _count(metrics, "policy/skipped_updates"),
        }
        self.values = {name: self.values[name] + count for name, count in new.items()}

    def save(self) -> dict[str, int]:
        """Return the counts, once they are in the file."""
        with self._lock:
            values = self.values
            if values is not self._saved and self._path is not None:
                self._write(self._path, values)
                self._saved = values
        return values

    def _write(self, path: Path, values: dict[str, int]) -> None:
        try:
            write_file(path, json.dumps(values))
        except RunError as error:
            rank_zero_warn(f"{error} The counters of Prometheus start at 0 when the run is resumed.")
            self._path = None
            with suppress(OSError):  # an old file would set the counters back without a sign
                path.unlink()


def _read(path: Path) -> dict[str, int]:
    zeros = dict.fromkeys(COUNTS, 0)
    if not path.exists():
        return zeros
    try:
        found: Any = json.loads(path.read_text())
        values = {name: found[name] for name in COUNTS}
        if all(type(value) is int and value >= 0 for value in values.values()):
            return values
    except (OSError, ValueError, TypeError, KeyError):
        pass
    rank_zero_warn(f"{path} has no counters that can be read: those of Prometheus start at 0.")
    return zeros


def _finite(metrics: Mapping[str, float], name: str) -> float:
    value = float(metrics.get(name, 0.0))
    return value if math.isfinite(value) and value > 0 else 0.0


def _count(metrics: Mapping[str, float], name: str) -> int:
    return round(_finite(metrics, name))


class RunCollector(Collector):
    """Newest metrics of a run, as Prometheus's client library asks for them.

    A step stores its numbers; files and text are written when Prometheus asks, in the server's thread.

    Args:
        run: Value of the label ``run``.
        counters: Counted by :meth:`update`.
        max_metrics: Most metrics that are served.
    """

    def __init__(self, run: str, counters: RunCounters, max_metrics: int) -> None:
        self._run = run
        self._counters = counters
        self._max_metrics = max_metrics
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._left_out: set[str] = set()
        self._step: int | None = None
        self._step_time = 0.0

    def update(self, metrics: Mapping[str, float], step: int | None) -> None:
        """Store the newest metrics; those of a step that trained are counted."""
        with self._lock:
            for name, value in metrics.items():
                if name in self._values or len(self._values) < self._max_metrics:
                    self._values[name] = float(value)
                else:
                    self._leave_out(name)
            if "completion/num_tokens" in metrics:
                self._counters.add(metrics)
                self._step_time = time.time()
                self._step = step

    def _leave_out(self, name: str) -> None:
        if not self._left_out:
            rank_zero_warn(
                f"Prometheus gets the first {self._max_metrics} metrics, and not {name!r} or others after it: raise "
                "max_metrics of PrometheusLogger. metrics.jsonl has them all."
            )
        if len(self._left_out) < self._max_metrics:  # names that change in every step must not fill the memory
            self._left_out.add(name)

    def collect(self) -> Iterator[Metric]:
        """Yield each name with its series."""
        counts = self._counters.save()
        with self._lock:
            values = dict(self._values)
            step, step_time, num_left_out = self._step, self._step_time, len(self._left_out)
        yield from self._counted(counts)
        if step is not None:
            yield self._gauge(names.STEP, "Number of the newest step.", step)
            yield self._gauge(names.LAST_STEP_TIME, "When the newest step ended, in seconds since 1970.", step_time)
        yield self._gauge(names.LEFT_OUT, "Metrics beyond max_metrics.", num_left_out)
        yield from self._gauges(values)

    def _counted(self, counts: Mapping[str, int]) -> Iterator[Metric]:
        for name, text in names.COUNTERS.items():
            is_errors = name == "errors"
            family = CounterMetricFamily(names.PREFIX + name, text, labels=["run", *(["kind"] if is_errors else [])])
            for kind in names.ERROR_KINDS if is_errors else ():
                family.add_metric([self._run, kind], counts[kind])
            if not is_errors:
                family.add_metric([self._run], counts[name])
            yield family

    def _gauges(self, values: Mapping[str, float]) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for metric, value in values.items():
            name, phase = names.series_of(metric)
            if name not in families:
                labels = ["run", "metric" if phase is None else "phase"]
                families[name] = GaugeMetricFamily(name, _help(name, metric), labels=labels)
            scale = GIB if name == names.PHASE_MEMORY else 1
            families[name].add_metric([self._run, metric if phase is None else phase], value * scale)
        yield from families.values()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["run"])
        family.add_metric([self._run], value)
        return family


def _help(name: str, metric: str) -> str:
    return {
        names.PHASE_SECONDS: "Seconds of each phase of the newest step.",
        names.PHASE_MEMORY: "Memory of each phase of the newest step.",
        names.STEP_SECONDS: "Seconds of the newest step.",
    }.get(name, f"Newest value of {metric}.")
