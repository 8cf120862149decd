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
"""File into which a user writes the key of servers of their own. Of servers that the run started each has one, with its
number, for the run's owner alone, while the run goes on."""
_PLACE: Final = "__server_place"
"""Label of a server by which a job finds its own; Prometheus drops those that begin so."""
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
        jobs += _engine_jobs(engines)
    if dcgm_exporters:
        jobs.append({"job_name": "dcgm", "static_configs": [{"targets": [*dcgm_exporters]}]})
    config = {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": jobs}
    return _HEAD + yaml.safe_dump(config, sort_keys=False)


def _engine_jobs(engines: ScrapeTargets) -> list[dict[str, Any]]:
    """Return one job for all servers, or one for each that has a key of its own."""
    shared: dict[str, Any] = {"file_sd_configs": [{"files": [ENGINES]}]}
    if not any(engines.keys):
        needed = {"authorization": {"credentials_file": KEY}} if engines.needs_key else {}
        return [{"job_name": "engine"} | shared | needed]
    jobs = []
    for place in range(len(engines.keys)):
        own = {"source_labels": [_PLACE], "regex": str(place), "action": "keep"}
        named = {"job_name": f"engine-{place}", "authorization": {"credentials_file": key_file(place)}}
        jobs.append(named | shared | {"relabel_configs": [own]})
    return jobs


def key_file(place: int) -> str:
    """Return the name of the file with the key of a server that the run started."""
    return f"{KEY}_{place}"


def _address(host: str, port: int) -> str:
    if host in ("", "0.0.0.0", "::"):  # any address of this machine
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def engines_json(engines: ScrapeTargets) -> str:
    """Return the list of the engine's servers, as Prometheus's file-based service discovery reads it."""
    found = []
    for place, url in enumerate(engines.urls):
        parts = urlsplit(url)
        labels = {"server": engines.engine, "__scheme__": parts.scheme, "__metrics_path__": f"{parts.path}/metrics"}
        labels[_PLACE] = str(place)
        address = parts.netloc.rpartition("@")[2]
        if parts.port is None:
            address = f"{address}:{443 if parts.scheme == 'https' else 80}"
        found.append({"targets": [address], "labels": labels})
    return json.dumps(found, indent=2)
