"""What loggers cost a step on the host: Prometheus with and without scrapes, and spans with and without a collector.

``python benchmarks/loggers.py [metrics.jsonl]`` logs the rows of a run's ``metrics.jsonl`` and prints the milliseconds
that a step waits for it: median and 99th percentile.
"""

from __future__ import annotations

import csv
import socket
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from rlplug_watch.loggers.phase_spans import PhaseSpans
from rlplug_watch.loggers.prometheus import PrometheusLogger

from rlplug.interfaces.observer import ObservedRun
from rlplug.observability.metrics_log import read_metrics
from rlplug.observability.phase_timer import PHASES, PhaseTimer

RESULTS: Final = Path(__file__).parent / "results"
METRICS: Final = RESULTS / "2026-11-23-titan-on-h200" / "transformers.csv"
NUM_STEPS: Final = 2000
RANK_0: Final[Any] = SimpleNamespace(is_global_zero=True)


class Collector(BaseHTTPRequestHandler):
    """An OTLP/HTTP collector that takes all."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def read_rows(path: Path) -> list[dict[str, float]]:
    if path.suffix == ".jsonl":
        return read_metrics(path)
    with path.open() as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def show(name: str, seconds: list[float]) -> None:
    cuts = statistics.quantiles(seconds, n=100)
    print(f"{name:55s} {1e3 * statistics.median(seconds):8.3f} {1e3 * cuts[98]:8.3f}")


@contextmanager
def scraped(port: int, every_s: float) -> Iterator[list[float]]:
    """Scrape a port again and again, and yield the seconds that each answer took."""
    seconds: list[float] = []
    ends = threading.Event()

    def scrape() -> None:
        while not ends.wait(every_s):
            began = time.perf_counter()
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()
            seconds.append(time.perf_counter() - began)

    thread = threading.Thread(target=scrape)
    thread.start()
    yield seconds
    ends.set()
    thread.join()


def time_prometheus(rows: list[dict[str, float]], every_s: float | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        logger = PrometheusLogger(port=0)
        logger.begin(ObservedRun(Path(folder), stage="fit", is_first_rank=True, report=False))
        seconds, answers = [], []

        def log() -> None:
            for step in range(NUM_STEPS):
                began = time.perf_counter()
                logger.log_metrics(rows[step % len(rows)], step=step)
                logger.engine_started(None)
                seconds.append(time.perf_counter() - began)
                time.sleep(0.001)

        if every_s is None:
            log()
        else:
            with scraped(logger.bound_port, every_s) as answers:
                log()
        logger.finalize("success")
    scrapes = "no scrapes" if every_s is None else f"a scrape every {every_s:g} s"
    show(f"PrometheusLogger, {len(rows[-1])} metrics, {scrapes}", seconds)
    if len(answers) > 1:
        show("  the answer to a scrape, in the server's thread", answers)


def time_spans(name: str, endpoint: str) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = SimpleNamespace(run_dir=Path(folder), timer=PhaseTimer(60), rollout_step=0)
        spans = PhaseSpans(endpoint, timeout_s=3)
        spans.setup(RANK_0, module, "fit")
        add: Callable[[str, float], Any] = module.timer.on_exit
        seconds = []
        for step in range(NUM_STEPS):
            began = time.perf_counter()
            spans.on_train_batch_start(RANK_0, module, None, step)
            for phase in PHASES:
                add(phase, 0.0001)
            seconds.append(time.perf_counter() - began)
            time.sleep(0.005)
        began = time.perf_counter()
        spans.teardown(RANK_0, module, "fit")
        ended = time.perf_counter() - began
    show(f"PhaseSpans, 9 spans a step, {name}", seconds)
    print(f"  the end of the run {ended:.2f} s")


def main(arguments: list[str]) -> None:
    rows = read_rows(Path(arguments[0]) if arguments else METRICS)
    print(f"{NUM_STEPS} steps{'':43s}  median      p99  (ms)")
    for every_s in (None, 5.0, 0.1):
        time_prometheus(rows, every_s)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    time_spans("a collector that takes all", f"http://127.0.0.1:{server.server_port}/v1/traces")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        time_spans("nobody at the collector's port", address)
        silent.listen()
        time_spans("a collector that never answers", address)


if __name__ == "__main__":
    main(sys.argv[1:])
