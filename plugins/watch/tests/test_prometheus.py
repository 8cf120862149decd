"""What Prometheus gets: its format, names that do not merge, counters that go on, and a port that closes."""

from __future__ import annotations

import http.client
import json
import math
import re
import socket
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from rlplug_watch.loggers import prometheus_exposition as exposition
from rlplug_watch.loggers.dashboard import ENGINES, HOSTS, PANELS, dashboard_json
from rlplug_watch.loggers.prometheus import DASHBOARD, PrometheusLogger

from rlplug.errors import ConfigError
from rlplug.interfaces import ObservedRun, ScrapeTargets

ROOT = Path(__file__).parents[3]
STEP = {
    "completion/num_tokens": 40.0,
    "completion/num_samples": 16.0,
    "reward/mean": 0.5,
    "reward/error_share": 0.125,
    "time/rollout": 1.5,
    "time/update": 2.0,
    "time/step": 3.5,
    "memory/update": 2.0,
}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"

Start = Callable[..., PrometheusLogger]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start loggers of the run ``quickstart/001``; their ports close at the end."""
    loggers = []

    def start(**options: Any) -> PrometheusLogger:
        run_dir = tmp_path / "quickstart" / "001"
        run_dir.mkdir(parents=True, exist_ok=True)
        logger = PrometheusLogger(**{"port": 0, **options})
        logger.begin(ObservedRun(run_dir, "fit", is_first_rank=True, report=False))
        loggers.append(logger)
        return logger

    yield start
    for logger in loggers:
        logger.finalize("success")


def scrape(logger: PrometheusLogger, accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{logger.bound_port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


def series(logger: PrometheusLogger) -> dict[tuple[str, str], float]:
    """Return the values by name and by the label that is not the run's, as the text format has them."""
    found = {}
    for family in parse_text(scrape(logger)):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "quickstart/001"
            key = (sample.name, next(iter(labels.values()), ""))
            assert key not in found
            found[key] = sample.value
    return found


def test_both_formats_have_phases_counters_and_gauges(start: Start) -> None:
    logger = start()
    logger.log_metrics({**STEP, "validate/pass@1": math.nan, "mismatch/max": math.inf}, step=7)
    found = series(logger)
    assert found["rlplug_reward_mean", "reward/mean"] == 0.5
    assert math.isnan(found["rlplug_validate_pass_1", "validate/pass@1"])
    assert found["rlplug_mismatch_max", "mismatch/max"] == math.inf
    assert found["rlplug_phase_seconds", "rollout"] == 1.5
    assert ("rlplug_phase_seconds", "step") not in found  # it is the sum of the others
    assert found["rlplug_step_seconds", "time/step"] == 3.5
    assert found["rlplug_phase_memory_bytes", "update"] == 2 * 2**30
    assert found["rlplug_step", ""] == 7
    assert (found["rlplug_steps_total", ""], found["rlplug_tokens_total", ""]) == (1, 40)
    assert (found["rlplug_samples_total", ""], found["rlplug_errors_total", "reward"]) == (16, 2)
    assert found["rlplug_errors_total", "environment"] == 0  # there from the start, so that a rate sees the first
    openmetrics = scrape(logger, OPENMETRICS)
    assert {family.type for family in parse_openmetrics(openmetrics)} == {"counter", "gauge"}


def test_metrics_whose_names_become_equal_keep_their_own_series(start: Start) -> None:
    """Catches a merge of two metrics, a gauge that takes a counter's name, and text that breaks the format."""
    logger = start()
    hostile = {
        "a/b": 1.0,
        "a_b": 2.0,
        "a b/": 3.0,
        "steps_total": 4.0,
        "step": 5.0,
        "phase/seconds": 6.0,
        "日本": 7.0,
        "/": 8.0,
        'x"} 1\n# TYPE rlplug_a counter\\': 9.0,
        'time/{quote}"\\\n': 10.0,
        "memory/": 11.0,
        "time": 12.0,
        "ends_total": 13.0,
        "ends_bucket": 14.0,
        "ends_created": 15.0,
        "x" * 200: 16.0,
    }
    logger.log_metrics({**STEP, **hostile}, step=1)
    found = series(logger)
    own = {label: value for (name, label), value in found.items() if label in hostile}
    assert own == {name: value for name, value in hostile.items() if not name.startswith("time/")}
    assert found["rlplug_phase_seconds", '{quote}"\\\n'] == 10.0
    assert found["rlplug_steps_total", ""] == 1
    assert found["rlplug_step", ""] == 1
    samples = sum(len(family.samples) for family in parse_openmetrics(scrape(logger, OPENMETRICS)))
    assert samples == len(found)


def test_counters_go_on_after_a_resume_that_repeats_steps(start: Start, tmp_path: Path) -> None:
    """Catches a counter that falls: Prometheus would count all that was before as new."""
    logger = start()
    for step in (1, 2, 3):
        logger.log_metrics(STEP, step=step)
    logger.finalize("failed")
    resumed = start()
    before = series(resumed)
    resumed.log_metrics({"validate/reward_mean": 1.0}, step=2)  # no step that trained
    resumed.log_metrics({**STEP, "completion/num_tokens": math.nan, "environment/failures": 3.0}, step=3)
    after = series(resumed)
    assert (before["rlplug_steps_total", ""], before["rlplug_tokens_total", ""]) == (3, 120)
    assert (after["rlplug_steps_total", ""], after["rlplug_tokens_total", ""]) == (4, 120)
    assert after["rlplug_errors_total", "environment"] == 0
    assert after["rlplug_step", ""] == 3
    # a kill now, without an end, loses nothing that was served
    assert json.loads((tmp_path / "quickstart/001/prometheus_counters.json").read_text())["samples"] == 64


def test_a_failed_trajectory_is_one_error(tmp_path: Path) -> None:
    """Alone catches a trajectory that its environment failed and that counts as a failed reward too."""
    counters = exposition.RunCounters(tmp_path / "counters.json")
    failed = {"reward/error_share": 10 / 64, "reward/environment/error_share": 8 / 64, "environment/failures": 8.0}
    counters.add({"completion/num_tokens": 640.0, "completion/num_samples": 64.0, **failed})
    assert (counters.values["reward"], counters.values["environment"]) == (2, 8)


@pytest.mark.parametrize("text", ["", "[1]", '{"steps": -1}', "\0", '{"steps": 1e999}'])
def test_counters_that_cannot_be_read_start_at_0_with_a_warning(tmp_path: Path, text: str) -> None:
    (tmp_path / "counters.json").write_text(text)
    with pytest.warns(UserWarning, match="counters that can be read"):
        counters = exposition.RunCounters(tmp_path / "counters.json")
    assert set(counters.values.values()) == {0}


def test_a_counter_file_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    counters = exposition.RunCounters(tmp_path / "gone" / "counters.json")
    counters.add(STEP)
    with pytest.warns(UserWarning, match="cannot be written"):
        counters.save()
    counters.add(STEP)
    assert counters.save()["steps"] == 2


def test_metrics_beyond_the_bound_are_left_out_with_one_warning(start: Start) -> None:
    logger = start(max_metrics=len(STEP) + 2)
    steps = [{**STEP, **{f"new/{step}/{index}": 0.0 for index in range(50)}} for step in range(3)]
    with pytest.warns(UserWarning, match="max_metrics"):
        logger.log_metrics(steps[0], step=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (2, 3):
            logger.log_metrics(steps[step - 1], step=step)
    found = series(logger)
    assert sum(name.startswith("rlplug_new") for name, _ in found) == 2
    assert found["rlplug_metrics_left_out", ""] == len(STEP) + 2  # what is counted is bounded too
    assert found["rlplug_steps_total", ""] == 3


def test_other_names_of_the_host_are_refused(start: Start) -> None:
    """Catches a page in a browser that has its own name point here, and reads the metrics."""
    logger = start()
    for name, status in (("evil.example", 403), ("127.0.0.1", 200), ("localhost:9400", 200), ("[::1]:9", 200)):
        connection = http.client.HTTPConnection("127.0.0.1", logger.bound_port, timeout=60)
        connection.request("GET", "/metrics", headers={"Host": name})
        assert connection.getresponse().status == status
        connection.close()


def test_a_taken_port_is_refused_by_name_and_freed_at_the_end(start: Start) -> None:
    first = start()
    port = first.bound_port
    with pytest.raises(ConfigError, match=rf"port {port} of 127\.0\.0\.1.*set another port"):
        start(port=port)
    first.finalize("failed")
    first.finalize("success")  # Lightning may call both
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
    first.log_metrics(STEP, step=9)  # late metrics do no harm


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 70_000}, "port is 70000"),
        ({"port": -1}, "port is -1"),
        ({"max_metrics": 0}, "max_metrics is 0"),
        ({"dcgm_exporters": ["http://gpu-1:9401/metrics"]}, "write HOST:PORT"),
        ({"host": "192.0.2.1"}, "192.0.2.1"),
        ({"host": "no such host"}, "no such host"),
    ],
)
def test_options_that_cannot_work_are_refused(start: Start, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        start(**options)


def test_prometheus_is_configured_for_the_run_and_its_engine(start: Start, tmp_path: Path) -> None:
    """Catches a key that others can read or that stays, and servers that Prometheus is not told of."""
    logger, folder = start(dcgm_exporters=["gpu-1:9401", "gpu-2:9401"]), tmp_path / "quickstart" / "001"
    assert not list(folder.iterdir())  # a resumed run may still be refused
    urls = ("http://127.0.0.1:8001", "http://127.0.0.1:8002")
    first = ScrapeTargets("vLLM", urls, needs_key=True, keys=("random", "another"))
    logger.engine_started(first)
    jobs = {job["job_name"]: job for job in yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"]}
    assert jobs["rlplug"]["static_configs"] == [{"targets": [f"127.0.0.1:{logger.bound_port}"]}]
    places = [each["labels"]["__server_place"] for each in json.loads((folder / "prometheus_engines.json").read_text())]
    for place, own in enumerate(first.keys):
        job, key = jobs[f"engine-{place}"], folder / f"prometheus_engine_key_{place}"
        assert job["file_sd_configs"] == [{"files": ["prometheus_engines.json"]}]
        assert job["relabel_configs"][0]["regex"] == places[place]
        assert job["authorization"] == {"credentials_file": key.name}
        assert (key.read_text(), key.stat().st_mode & 0o777) == (own, 0o600)
    assert jobs["dcgm"]["static_configs"] == [{"targets": ["gpu-1:9401", "gpu-2:9401"]}]
    assert "random" not in repr(first)

    logger.engine_started(ScrapeTargets("vLLM", ("https://user:pw@host/path", "http://[::1]:9"), needs_key=False))
    (one, two) = json.loads((folder / "prometheus_engines.json").read_text())
    assert one["targets"] == ["host:443"]
    scheme = {"__scheme__": "https", "__metrics_path__": "/path/metrics"}
    assert one["labels"] == {"server": "vLLM", **scheme, "__server_place": "0"}
    assert two["targets"] == ["[::1]:9"]
    logger.finalize("success")
    assert not list(folder.glob("prometheus_engine_key*"))


def test_the_metrics_page_needs_no_engine(start: Start, tmp_path: Path) -> None:
    logger, folder = start(), tmp_path / "quickstart" / "001"
    logger.engine_started(None)
    assert "engine" not in yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"][-1]["job_name"]
    assert json.loads((folder / "grafana.json").read_text())["title"] == "rlplug"


def test_each_query_of_the_dashboard_names_a_series_of_a_documented_metric(start: Start) -> None:
    """Catches a metric that was renamed: these pages have every metric, and other tests hold them to the code."""
    pages = [(ROOT / "docs" / page).read_text() for page in ("the-step.md", "asynchronous.md", "rollout-engines.md")]
    cells = [line.split(" | ")[0] for page in pages for line in page.splitlines() if line.startswith("| `")]
    documented = {re.sub(r"<\w+>", "1", name) for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    logger = start()
    logger.log_metrics({**dict.fromkeys(documented, 1.0), **STEP}, step=1)
    served = {name for name, _ in series(logger)}
    for panel in PANELS:
        names = {name for _, query in panel.queries for name in re.findall(r"rlplug_\w+", query)}
        assert names <= served, panel.title
        assert names or panel.row in (ENGINES, HOSTS)
    assert DASHBOARD.read_text() == dashboard_json(), "run make docs"
