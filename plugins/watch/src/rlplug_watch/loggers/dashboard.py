"""Grafana dashboard of the metrics that :class:`PrometheusLogger` serves; the charts are those of the report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from rlplug_watch.loggers import prometheus_names as names
from rlplug_watch.report.charts import LINE_CHARTS, OPTIONAL_CHARTS, LineChart

RUN: Final = 'run=~"$run"'
IN_SOME_RUNS: Final = "In some runs"
ENGINES: Final = "Engine servers"
HOSTS: Final = "GPUs of the hosts"
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 8
NUM_COLUMNS: Final = 24 // WIDTH
UNITS: Final = dict.fromkeys(
    ("share", "share of completions", "share of tokens", "share of prompts", "share of the rollout's time"),
    "percentunit",
)


@dataclass(frozen=True)
class Panel:
    """A chart over time, with a label and a PromQL query for each of its lines."""

    row: str
    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "none"
    about: str = ""


def _of_metrics(row: str, title: str, *metrics: tuple[str, str]) -> Panel:
    return Panel(row, title, tuple((f"{{{{run}}}} {label}", names.query_of(name, RUN)) for label, name in metrics))


def _of_chart(chart: LineChart, row: str) -> Panel:
    queries = tuple((f"{{{{run}}}} {label}", names.query_of(metric, RUN)) for label, metric, _ in chart.lines)
    note = f"{chart.unit}. {chart.note}".strip(" .") if chart.unit else chart.note
    return Panel(row, chart.title, queries, UNITS.get(chart.unit, "none"), note)


def _rate(counter: str) -> str:
    return f"rate({names.PREFIX}{counter}_total{{{RUN}}}[$__rate_interval])"


def _engine(title: str, *queries: tuple[str, str], unit: str = "none") -> Panel:
    return Panel(ENGINES, title, tuple((f"{{{{instance}}}} {label}", query) for label, query in queries), unit)


def _dcgm(title: str, unit: str, *queries: tuple[str, str]) -> Panel:
    labelled = tuple((f"{{{{Hostname}}}} GPU {{{{gpu}}}} {label}".strip(), query) for label, query in queries)
    about = "Needs a DCGM exporter on every host: dcgm_exporters of PrometheusLogger."
    return Panel(HOSTS, title, labelled, unit, about)


def _sglang(name: str) -> str:
    """Return a query of SGLang's metric under the prefix of older and of newer versions."""
    return f'{{__name__=~"sglang[:_]{name}"}}'


PANELS: Final = (
    _of_metrics(
        "Learning",
        "Reward",
        ("mean", "reward/mean"),
        ("least", "reward/min"),
        ("most", "reward/max"),
    ),
    _of_metrics("Learning", "Policy loss", ("loss", "loss")),
    *(_of_chart(chart, chart.section) for chart in LINE_CHARTS),
    Panel(
        "Speed and memory",
        "Time of each phase",
        (("{{run}} {{phase}}", f"{names.PHASE_SECONDS}{{{RUN}}}"),),
        "s",
    ),
    Panel(
        "Speed and memory",
        "Memory of each phase",
        (("{{run}} {{phase}}", f"{names.PHASE_MEMORY}{{{RUN}}}"),),
        "bytes",
    ),
    Panel(
        "Speed and memory",
        "Tokens and completions",
        (("{{run}} tokens/s", _rate("tokens")), ("{{run}} completions/s", _rate("samples"))),
        about="Rates of the counters: they stay right when Prometheus misses steps.",
    ),
    Panel(
        "Speed and memory",
        "Errors",
        (("{{run}} {{kind}}", f"increase({names.PREFIX}errors_total{{{RUN}}}[$__rate_interval])"),),
        about="Completions whose reward failed, those whose environment did, updates that were not finite.",
    ),
    Panel(
        "Speed and memory",
        "Seconds since the newest step",
        (("{{run}}", f"time() - {names.LAST_STEP_TIME}{{{RUN}}}"),),
        "s",
        "A run that stands still rises; one that has ended is not there any more.",
    ),
    _of_metrics(
        IN_SOME_RUNS,
        "Validation",
        ("reward", "validate/reward_mean"),
        ("pass@1", "validate/pass@1"),
    ),
    *(_of_chart(chart, IN_SOME_RUNS) for chart in OPTIONAL_CHARTS),
    _engine(
        "Requests",
        ("running", "vllm:num_requests_running"),
        ("waiting", "vllm:num_requests_waiting"),
        ("running", _sglang("num_running_reqs")),
        ("waiting", _sglang("num_queue_reqs")),
    ),
    _engine(
        "KV cache in use", ("vLLM", "vllm:kv_cache_usage_perc"), ("SGLang", _sglang("token_usage")), unit="percentunit"
    ),
    _engine(
        "Generated tokens a second",
        ("vLLM", "rate(vllm:generation_tokens_total[$__rate_interval])"),
        ("SGLang", _sglang("gen_throughput")),
    ),
    _dcgm(
        "Busy",
        "percentunit",
        ("any kernel", "DCGM_FI_DEV_GPU_UTIL / 100"),
        ("tensor cores", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
        ("memory's interface", "DCGM_FI_PROF_DRAM_ACTIVE"),
    ),
    _dcgm("Memory in use", "bytes", ("", "DCGM_FI_DEV_FB_USED * 1048576")),
    _dcgm("Power", "watt", ("", "DCGM_FI_DEV_POWER_USAGE")),
    _dcgm(
        "PCIe",
        "Bps",
        ("sent", "DCGM_FI_PROF_PCIE_TX_BYTES"),
        ("received", "DCGM_FI_PROF_PCIE_RX_BYTES"),
    ),
)


def dashboard_json() -> str:
    """Return the dashboard as JSON, which Grafana imports as it is."""
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        {
            "name": "run",
            "type": "query",
            "datasource": DATASOURCE,
            "query": f"label_values({names.PREFIX}steps_total, run)",
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]
    page = {
        "title": "rlplug",
        "uid": "rlplug",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": list(_grid()),
    }
    return json.dumps(page, indent=1) + "\n"


def _grid() -> Iterator[dict[str, Any]]:
    """Yield rows and their panels, with numbers and places."""
    number, top = 0, 0
    for row in dict.fromkeys(panel.row for panel in PANELS):
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row,
            "collapsed": False,
            "panels": [],
            "gridPos": _place(0, top, 24, 1),
        }
        top += 1
        members = [panel for panel in PANELS if panel.row == row]
        for index, panel in enumerate(members):
            number += 1
            place = _place(index % NUM_COLUMNS * WIDTH, top + index // NUM_COLUMNS * HEIGHT, WIDTH, HEIGHT)
            yield {"id": number, "gridPos": place, **_panel(panel)}
        top += -(-len(members) // NUM_COLUMNS) * HEIGHT


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": query, "legendFormat": label}
        for index, (label, query) in enumerate(panel.queries)
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": targets,
    }
