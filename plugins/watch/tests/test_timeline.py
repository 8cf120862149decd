"""The timeline of single steps: what is recorded, which steps are shown, and what the figures say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_runs import make_run, timeline_line
from rlplug_async.timeline import MOST_COUNTS, EngineTimeline, timeline_of
from rlplug_watch.commands.report import report_command
from rlplug_watch.report.figures import PHASE_HUES
from rlplug_watch.report.timeline import FILE, NEWEST, ChosenSteps, timeline_figures

from rlplug.errors import ConfigError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "run", num_steps=20)
    (folder / FILE).write_text(
        "".join(timeline_line(step) for step in range(1, 21)) + '{"step": 21, "groups": [], "timel'
    )
    return folder


def test_a_figure_has_what_trainer_and_engine_did(run_dir: Path) -> None:
    """It catches bars at other times or in other lanes than those recorded, and a state that outlives its step."""
    work, flight = timeline_figures(ChosenSteps.parse("10-12").read(run_dir / FILE), PHASE_HUES)
    bars = {
        trace["name"]: (trace["y"][0], list(zip(trace["base"], trace["x"], strict=True))) for trace in work.spec["data"]
    }
    assert bars == {
        "rollout": ("trainer", [(0, 4), (10, 4), (20, 4)]),
        "update": ("trainer", [(4, 5), (14, 5), (24, 5)]),
        "strange": ("trainer", [(9, 1), (19, 1), (29, 1)]),
        "generating": ("engine", [(1, 8), (11, 8), (21, 8)]),
        "pausing": ("engine", [(9, 1), (19, 1), (29, 1)]),
        "weight sync": ("engine", [(0, 1), (10, 1), (20, 1)]),
        "held-out requests in flight": ("validation beside", [(11, 3)]),
    }
    assert [note["text"] for note in work.spec["layout"]["annotations"]] == ["10", "11", "12"]
    assert work.spec["layout"]["xaxis"]["range"] == [0.0, 30.0]
    training, held_out = flight.spec["data"]
    assert (training["x"], training["y"]) == ([1, 4, 11, 14, 21, 24, 30], [8, 3, 8, 3, 8, 3, 3])
    assert held_out["y"] == [0, 0, 5, 0, 0, 0, 0]
    json.dumps([work.spec, flight.spec], allow_nan=False)


def test_steps_are_chosen_and_the_newest_are_shown_otherwise(run_dir: Path) -> None:
    path = run_dir / FILE
    assert [each.step for each in NEWEST.read(path)] == [16, 17, 18, 19, 20]
    assert [each.step for each in ChosenSteps.parse("3").read(path)] == [3]
    assert ChosenSteps.parse("30-31").read(path) == []
    assert timeline_figures([], PHASE_HUES) == []
    for damaged in ('{"step": 2, "groups": []}\n', '{"step": 2, "timeline": {"phases": [["a", 1]]}}\n', "[" * 5000):
        path.write_text(damaged)
        assert NEWEST.read(path) == []
    for text in ("a", "3-", "-3", "5-4", "1-51", ""):
        with pytest.raises(ConfigError, match="--steps"):
            ChosenSteps.parse(text)


def test_the_report_shows_the_steps_that_are_asked_for(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    report_command([str(run_dir), "--steps", "3-7"])  # where each lane has bars of its own alone
    page = (run_dir / "report.html").read_text()
    assert "Trainer and engine, step by step" in page
    assert "seconds since step 3 began" in page
    with pytest.raises(ConfigError, match=r"no timeline of steps 30 to 31: runs with model\.partial_rollout record"):
        report_command([str(run_dir), "--steps", "30-31"])


def test_what_one_step_records_is_bounded() -> None:
    """It catches a line that grows with the completions of a step, and a step that begins without a count."""
    engine = EngineTimeline()
    engine.change("generating")
    for number in range(10_000):
        engine.count(number, 0)
        engine.count(number, 0)
    found = engine.pop()
    assert len(found["requests"]) <= MOST_COUNTS
    assert found["requests"][-1][1] >= 10_000 - MOST_COUNTS
    assert engine.pop() == {"engine": [], "requests": found["requests"][-1:]}
    assert len(json.dumps(timeline_of([("update", 1.0, 2.0)] * 20, found))) < 8000
