"""A real Prometheus scrapes a real run, and every panel of the dashboard returns a series."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from command_line import ROOT, SCRIPT, SMALL
from forked import ForkedProcess, free_port
from rlplug_watch.loggers.dashboard import ENGINES, IN_SOME_RUNS, PANELS
from rlplug_watch.loggers.prometheus import PrometheusLogger
from rlplug_watch.report.charts import OPTIONAL_CHARTS

from rlplug.interfaces import ScrapeTargets

BINARY = shutil.which("prometheus")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(BINARY is None, reason="no prometheus on PATH: apt-get install prometheus"),
]

KEY = "key-of-the-servers"
EXPOSITIONS = Path(__file__).with_name("engine_metrics.txt")
"""What engines serve: vLLM 0.32 in a run on a CPU, and SGLang by its documentation, with the older prefix."""
INTERVALS = {"$__rate_interval": "20s", 'run=~"$run"': 'run=~".*"'}


class EngineMetrics(BaseHTTPRequestHandler):
    """An engine's server that asks for its key."""

    def do_GET(self) -> None:
        is_allowed = self.headers.get("Authorization") == f"Bearer {KEY}" and self.path == "/metrics"
        self.send_response(200 if is_allowed else 401)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(EXPOSITIONS.read_bytes() if is_allowed else b"")

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Prometheus:
    """A Prometheus that scrapes each second."""

    def __init__(self, folder: Path, configs: list[Path]) -> None:
        jobs = []
        for index, config in enumerate(configs):
            for job in yaml.safe_load(config.read_text())["scrape_configs"]:
                # the files that a configuration names are beside it
                text = yaml.safe_dump(job | {"job_name": f"{job['job_name']}-{index}"})
                for name in ("prometheus_engines.json", "prometheus_engine_key_0"):
                    text = text.replace(name, str(config.parent / name))
                jobs.append(yaml.safe_load(text))
        config = folder / "scraper.yml"
        config.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
        self.url = f"http://127.0.0.1:{free_port()}"
        address = self.url.removeprefix("http://")
        options = [f"--config.file={config}", f"--storage.tsdb.path={folder}/tsdb", f"--web.listen-address={address}"]
        with (folder / "prometheus.log").open("w") as log:
            self.process = subprocess.Popen([str(BINARY), *options], stdout=log, stderr=subprocess.STDOUT)

    def query(self, expression: str) -> list[dict[str, Any]]:
        for name, value in INTERVALS.items():
            expression = expression.replace(name, value)
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{query}", timeout=10) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return result

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


def until(is_true: Callable[[], Any], timeout_s: float = 240) -> Any:
    """Wait until a call returns something, and return that."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if found := is_true():
                return found
        except OSError:  # it has not started yet
            pass
        time.sleep(0.5)
    raise AssertionError(f"{is_true} took more than {timeout_s} s")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ForkedProcess]]:
    """A run of PPO, which goes on until it is told to stop."""
    folder = tmp_path_factory.mktemp("run")
    arguments = [
        *(*SMALL, "-c", "configs/algo/ppo.yaml", "--model.validation.every_n_steps", "5"),
        *("--model.algorithm.kl_coefficient", "0.01", "--model.num_steps", "100000", "--run.dir", str(folder)),
        *("--trainer.logger", "PrometheusLogger", "--trainer.logger.init_args.port", "0"),
    ]
    log = folder / "run.log"
    process = ForkedProcess([sys.executable, SCRIPT, "{}", *arguments], env=dict(os.environ), cwd=ROOT, output=log)
    try:
        until(lambda: (folder / "001/prometheus.yml").exists() or process.poll() is not None)
        assert process.poll() is None, log.read_text()[-3000:]
        yield folder / "001", process
    finally:
        process.kill()


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Configuration of what no run on a CPU has: metrics of environments and asynchronous runs, and an engine."""
    folder = tmp_path_factory.mktemp("others") / "stand-in"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), EngineMetrics)
    Thread(target=server.serve_forever, daemon=True).start()
    logger = PrometheusLogger(port=0)
    logger.start_run(folder)
    logger.log_metrics({name: 1.0 for chart in OPTIONAL_CHARTS for _, name, _ in chart.lines}, step=1)
    logger.engine_started(ScrapeTargets("vLLM", (f"http://127.0.0.1:{server.server_port}",), True, (KEY,)))
    yield folder / "prometheus.yml"
    logger.finalize("success")
    server.shutdown()
    server.server_close()


def test_every_panel_returns_a_series(run: tuple[Path, ForkedProcess], others: Path, tmp_path: Path) -> None:
    run_dir, process = run
    prometheus = Prometheus(tmp_path, [run_dir / "prometheus.yml", others])
    try:
        until(lambda: len(prometheus.query("rlplug_steps_total > 3")) == 1)
        until(lambda: prometheus.query("rate(rlplug_tokens_total[20s]) > 0"))
        until(lambda: prometheus.query("rlplug_validate_pass_1"))
        until(lambda: prometheus.query("vllm:num_requests_running"))
        assert {result["value"][1] for result in prometheus.query("up")} == {"1"}
        own = f"{run_dir.parent.name}/001"
        for panel in PANELS:
            for _, query in panel.queries:
                runs = {result["metric"].get("run") for result in prometheus.query(query)}
                assert runs, f"{panel.title}: {query}"
                is_of_all_runs = panel.row not in (IN_SOME_RUNS, ENGINES)
                assert own in runs or not is_of_all_runs, f"{panel.title}: {query}"
        assert own in {result["metric"]["run"] for result in prometheus.query("rlplug_critic_loss")}

        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=120) == 143
        until(lambda: prometheus.query('up{job="rlplug-0"} == 0'), 30)  # the port is closed
        counters = json.loads((run_dir / "prometheus_counters.json").read_text())
        assert counters["steps"] * 16 == counters["samples"] > 16
    finally:
        prometheus.close()
