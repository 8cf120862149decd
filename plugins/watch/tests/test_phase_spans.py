"""Spans of steps and phases, in OpenTelemetry's own exporters; a collector that is dead costs the run nothing."""

from __future__ import annotations

import socket
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk.trace")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rlplug_watch.loggers.phase_spans import PhaseSpans

from rlplug.errors import ConfigError
from rlplug.observability.phase_timer import PhaseTimer

RANK_0: Any = SimpleNamespace(is_global_zero=True)


class InMemory(PhaseSpans):
    """Keeps its spans."""

    def make_exporter(self) -> Any:
        self.exporter = InMemorySpanExporter()
        return self.exporter


def run_steps(spans: PhaseSpans, run_dir: Path, num_steps: int = 2) -> float:
    """Run steps of two phases, with a checkpoint after the first, and return the seconds of the longest hook."""
    module = SimpleNamespace(run_dir=run_dir, timer=PhaseTimer(60), rollout_step=0)
    longest = 0.0
    spans.setup(RANK_0, module, "fit")
    for step in range(num_steps):
        began = time.perf_counter()
        spans.on_train_batch_start(RANK_0, module, None, step)
        longest = max(longest, time.perf_counter() - began)
        for name in ("rollout", "update"):
            with module.timer.phase(name):
                time.sleep(0.002)
        module.rollout_step += 1
        if step == 0:
            with module.timer.phase("checkpoint"):
                pass
    spans.teardown(RANK_0, module, "fit")
    return longest


def test_a_step_is_a_span_and_its_phases_are_children(tmp_path: Path) -> None:
    spans = InMemory()
    run_steps(spans, tmp_path / "quickstart" / "001")
    found = spans.exporter.get_finished_spans()
    steps = [span for span in found if span.name == "step"]
    assert [span.attributes["rlplug.step"] for span in steps] == [1, 2]
    assert all(span.resource.attributes["rlplug.run"] == "quickstart/001" for span in found)
    for step, names in zip(steps, [["rollout", "update", "checkpoint"], ["rollout", "update"]], strict=True):
        children = [span for span in found if span.parent and span.parent.span_id == step.context.span_id]
        assert [span.name for span in children] == names
        assert step.start_time <= children[0].start_time
        assert children[-1].end_time <= step.end_time
        assert all(span.end_time - span.start_time > 1_900_000 for span in children[:2])  # nanoseconds


def test_a_failure_ends_the_open_step_and_marks_it(tmp_path: Path) -> None:
    spans = InMemory()
    module = SimpleNamespace(run_dir=tmp_path, timer=PhaseTimer(60), rollout_step=4)
    spans.setup(RANK_0, module, "fit")
    spans.on_train_batch_start(RANK_0, module, None, 0)
    spans.on_exception(RANK_0, module, ValueError("x"))
    spans.teardown(RANK_0, module, "fit")
    (step,) = spans.exporter.get_finished_spans()
    assert (step.attributes["rlplug.step"], step.status.description) == (5, "ValueError")


@pytest.mark.parametrize("answers", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_dead_collector_is_a_warning_and_no_wait(tmp_path: Path, answers: bool) -> None:
    """A port that nobody has, and one that takes connections and never answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if answers:
            silent.listen()
        port = silent.getsockname()[1]
        spans = PhaseSpans(endpoint=f"http://127.0.0.1:{port}/v1/traces", timeout_s=0.5)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            began = time.perf_counter()
            run_steps(spans, tmp_path)
            assert time.perf_counter() - began < 20  # OpenTelemetry's own shutdown waits for 30


@pytest.mark.parametrize(
    ("options", "message"), [({"endpoint": "localhost:4318"}, "give a URL"), ({"timeout_s": 0}, "above 0")]
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PhaseSpans(**options)
