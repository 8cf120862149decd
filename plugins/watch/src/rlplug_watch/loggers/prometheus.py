"""Logger that serves a run's newest metrics to Prometheus."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from rlplug.distributed.durable_files import write_file
from rlplug.errors import ConfigError
from rlplug.interfaces.observer import ObservedRun, RunObserver
from rlplug.interfaces.rollout import ScrapeTargets
from rlplug_watch.hosts import allowed_hosts, is_own
from rlplug_watch.loggers.scrape_config import ENGINES, KEY, SCRAPE_CONFIG, engines_json, key_file, prometheus_yml

COUNTERS: Final = "prometheus_counters.json"
COPIED_DASHBOARD: Final = "grafana.json"
DASHBOARD: Final = Path(__file__).with_name("grafana.json")
"""Dashboard for Grafana, which ``scripts/write_dashboard.py`` writes."""


class PrometheusLogger(Logger, RunObserver):
    """Logger that serves the newest metrics on an HTTP port, which Prometheus scrapes.

    The first rank serves them from before the models are loaded until the run ends or fails. The run folder gets
    ``prometheus.yml``, with which Prometheus scrapes the run and its engine's servers, and ``grafana.json``, a
    dashboard. Needs the extra ``rlplug-watch[prometheus]``.

    Args:
        port: TCP port; 0 takes a free one, which ``prometheus.yml`` then names.
        host: Address to listen on. There is no password; requests by names of other machines are refused.
        max_metrics: Most metrics that are served; what comes later is left out, with a warning.
        dcgm_exporters: Addresses of NVIDIA's DCGM exporters, such as ``[gpu-1:9401]``, for ``prometheus.yml``.
    """

    def __init__(
        self,
        port: int = 9400,
        host: str = "127.0.0.1",
        max_metrics: int = 1000,
        dcgm_exporters: list[str] | None = None,
    ) -> None:
        super().__init__()
        if wrong := [each for each in dcgm_exporters or () if not re.fullmatch(r"[^\s/]+:\d+", each)]:
            raise ConfigError(f"PrometheusLogger's dcgm_exporters has {wrong[0]!r}: write HOST:PORT.")
        if not 0 <= port < 2**16:
            raise ConfigError(f"PrometheusLogger's port is {port}: give one from 0 to 65535, where 0 takes a free one.")
        if max_metrics < 1:
            raise ConfigError(f"PrometheusLogger's max_metrics is {max_metrics}: give at least 1.")
        if importlib.util.find_spec("prometheus_client") is None:
            raise ConfigError("PrometheusLogger needs prometheus-client: pip install 'rlplug-watch[prometheus]'.")
        self.port = port
        self.host = host
        self.max_metrics = max_metrics
        self.dcgm_exporters = dcgm_exporters or []
        self._run_dir = Path()
        self._server: Any = None
        self._collector: Any = None
        self._counters: Any = None

    @property
    def name(self) -> str:
        return "prometheus"

    @property
    def version(self) -> str:
        return run_label(self._run_dir)

    def begin(self, run: ObservedRun) -> None:
        """Open the port, on the first rank; write nothing yet, since a resumed run may be refused.

        Raises:
            ConfigError: The port is taken, or the host is no address of this machine.
        """
        self._run_dir = run_dir = run.folder
        if not run.is_first_rank:
            return
        from prometheus_client import CollectorRegistry, start_http_server

        from rlplug_watch.loggers.prometheus_exposition import RunCollector, RunCounters

        self._counters = RunCounters(run_dir / COUNTERS)
        self._collector = RunCollector(self.version, self._counters, self.max_metrics)
        registry = CollectorRegistry()
        registry.register(self._collector)
        try:
            self._server = start_http_server(self.port, self.host, registry=registry)
            server = self._server[0]
            server.set_app(guarded(server.get_app(), allowed_hosts(self.host)))
        except OSError as error:  # a name that is unknown too
            raise ConfigError(
                f"PrometheusLogger cannot listen on port {self.port} of {self.host} ({error.strerror or error}). If "
                "another run has it, set another port in trainer.logger's init_args, or 0 for a free one; the host "
                "must be an address of this machine."
            ) from error

    @property
    def bound_port(self) -> int:
        """Port that is served."""
        return int(self._server[0].server_port)

    def engine_started(self, targets: ScrapeTargets | None) -> None:
        """Write ``prometheus.yml``, and again whenever the servers of the engine have changed."""
        if self._server is None:
            return
        folder = self._run_dir
        if targets is not None:
            write_file(folder / ENGINES, engines_json(targets))
            for place, key in enumerate(targets.keys):
                write_private(folder / key_file(place), key)
        write_file(folder / SCRAPE_CONFIG, prometheus_yml(self.host, self.bound_port, targets, self.dcgm_exporters))
        write_file(folder / COPIED_DASHBOARD, DASHBOARD.read_text(encoding="utf-8"))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: Prometheus stores numbers."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self._collector is not None:
            self._collector.update(metrics, step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the port, and remove the key of servers that end with the run."""
        if self._server is None:
            return
        (server, thread), self._server = self._server, None
        server.shutdown()
        server.server_close()
        thread.join()
        self._counters.save()
        for file in self._run_dir.glob(f"{KEY}_*"):
            file.unlink(missing_ok=True)


def guarded(app: Callable[..., Iterable[bytes]], names: frozenset[str]) -> Callable[..., Iterable[bytes]]:
    """Return a WSGI application that refuses requests whose ``Host`` is another machine's name."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if is_own(environ.get("HTTP_HOST", ""), names):
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"This run answers to {', '.join(sorted(names))} and to addresses, not to other names.".encode()]

    return answer


def run_label(run_dir: Path) -> str:
    """Return the label of a run: its folder's name, after its parent's where that is a number."""
    folder = run_dir.resolve()
    return f"{folder.parent.name}/{folder.name}" if folder.name.isdigit() else folder.name


def write_private(path: Path, text: str) -> None:
    """Write a file that its owner alone may read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
