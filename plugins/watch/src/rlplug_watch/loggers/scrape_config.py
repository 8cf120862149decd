"""Configuration of Prometheus for a run: its own port, and the servers of its engine."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import yaml

from rlplug.interfaces.rollout import ScrapeTargets

SCRAPE_CONFIG: Final = "prometheus.yml"
ENGINES: Final = "prometheus_engines.json"
"""File in which Prometheus looks for the engine's servers, again and again: a run may lose and start some."""
KEY: Final = "prometheus_engine_key"
"""File with the key of servers that the run started, for its owner alone, while the run goes on."""
SCRAPE_S: Final = 5

_HEAD: Final = """\
# Scrapes this run and its engine's servers: prometheus --config.file=prometheus.yml
# To scrape it with a Prometheus that runs already, copy the jobs below into its configuration.
"""


def prometheus_yml(host: str, port: int, engines: ScrapeTargets | None, dcgm_exporters: Sequence[str] = ()) -> str:
    """Return the text of ``prometheus.yml``.

    Args:
        host: Address that the run listens on.
        port: Its port.
        engines: The engine's servers; ``None`` for an engine without.
        dcgm_exporters: Addresses of exporters of the GPUs' counters, ``HOST:PORT``.
    """
    jobs: list[dict[str, Any]] = [{"job_name": "rlplug", "static_configs": [{"targets": [_address(host, port)]}]}]
    if engines is not None:
        job: dict[str, Any] = {"job_name": "engine", "file_sd_configs": [{"files": [ENGINES]}]}
        if engines.needs_key:
            job["authorization"] = {"credentials_file": KEY}
        jobs.append(job)
    if dcgm_exporters:
        jobs.append({"job_name": "dcgm", "static_configs": [{"targets": [*dcgm_exporters]}]})
    config = {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": jobs}
    return _HEAD + yaml.safe_dump(config, sort_keys=False)


def _address(host: str, port: int) -> str:
    if host in ("", "0.0.0.0", "::"):  # any address of this machine
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def engines_json(engines: ScrapeTargets) -> str:
    """Return the list of the engine's servers, as Prometheus's file-based service discovery reads it."""
    found = []
    for url in engines.urls:
        parts = urlsplit(url)
        labels = {"server": engines.engine, "__scheme__": parts.scheme, "__metrics_path__": f"{parts.path}/metrics"}
        address = parts.netloc.rpartition("@")[2]
        if parts.port is None:
            address = f"{address}:{443 if parts.scheme == 'https' else 80}"
        found.append({"targets": [address], "labels": labels})
    return json.dumps(found, indent=2)
