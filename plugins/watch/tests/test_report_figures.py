"""Figures of the report, and the series, samples and numbers that it picks from a run folder."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_runs import lines_of, make_run, metric_rows, sample_rows, write_samples
from rlplug_watch.report import figures
from rlplug_watch.report.figures import build_figures, reward_functions
from rlplug_watch.report.run_data import Metrics, read_run
from rlplug_watch.report.sample_log import Candidate, best_and_worst
from rlplug_watch.report.series import Series, bucket_means, keep_extremes, smooth
from rlplug_watch.report.summary import duration, number

from rlplug.observability.phase_timer import PHASES

go = pytest.importorskip("plotly.graph_objects")


def test_every_figure_is_valid_plotly_and_holds_the_metrics(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    figures, absent = build_figures(read_run(run_dir).metrics)
    by_title = {figure.title: figure for figure in figures}

    assert absent == []
    for figure in figures:
        # Plotly's own schema, which rejects an unknown property and a bad value.
        go.Figure({"data": figure.spec["data"], "layout": figure.spec["layout"]})
        covered = sorted(index for entry in figure.legend for index in entry.traces)
        assert covered == list(range(len(figure.traces)))
    raw = next(trace for trace in by_title["Reward"].traces if trace["name"] == "training mean")
    assert raw["y"] == pytest.approx([row["reward/mean"] for row in metric_rows(160)], rel=1e-4)
    validation = next(trace for trace in by_title["Reward"].traces if trace["name"] == "validation pass@1")
    assert validation["x"] == [0, 20, 40, 60, 80, 100, 120, 140, 159]
    assert by_title["Engine and trainer mismatch"].spec["layout"]["yaxis"]["type"] == "log"
    assert "type" not in by_title["Gradient norm"].spec["layout"]["yaxis"]
    stack = by_title["Where the time goes"].traces
    names = [trace["name"] for trace in stack]
    assert names[:3] == ["prompts", "sync", "rollout"]
    assert names[-1] == "outside the phases"
    assert sum(trace["y"][7] for trace in stack) == pytest.approx(metric_rows(160)[7]["time/step"], rel=1e-3)


COLOUR = re.compile(r"--([a-z]+): #([0-9a-f]{6})")


def test_no_two_phases_look_alike() -> None:
    """Catches a phase that is added and takes another's colour, in either theme."""
    css = (Path(figures.__file__).parent / "report.css").read_text()
    light, dark = css.split("prefers-color-scheme: dark", 1)
    phases = {f"time/{phase}": (1.0,) for phase in (*PHASES, "validate", "checkpoint", "step")}
    (figure,) = [f for f in build_figures(Metrics((1,), phases))[0] if f.title == "Where the time goes"]
    hues = [entry.hue for entry in figure.legend]
    assert len(hues) == len(PHASES) + 2
    for theme in (light, dark.split("}", 1)[0]):
        found = {name: bytes.fromhex(value) for name, value in COLOUR.findall(theme)}
        for first, second in itertools.combinations(hues, 2):
            assert math.dist(found[first], found[second]) > 40, (first, second)


def test_the_chart_of_memory_has_few_lines_that_differ() -> None:
    """Catches ten lines on top of each other, and an axis on which lines that are close are one."""
    names = (*PHASES, "validate", "checkpoint")
    columns = {f"memory/{phase}": (0.40 + 0.01 * index, 0.42) for index, phase in enumerate(names)}
    (figure,) = build_figures(Metrics((1, 2), columns))[0]
    assert [entry.label for entry in figure.legend] == ["rollout", "logprobs", "update", "highest of the other phases"]
    assert figure.traces[-1]["y"] == [0.50, 0.42]
    assert "rangemode" not in figure.y_axis


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=2, max_size=60))
def test_the_band_stays_within_the_rewards(steps: list[list[float]]) -> None:
    """Catches a band above the best or below the worst reward, which nothing can reach."""
    summaries = {"mean": fmean, "std": pstdev, "min": min, "max": max}
    columns = {f"reward/{name}": tuple(function(row) for row in steps) for name, function in summaries.items()}
    (figure,) = build_figures(Metrics(tuple(range(len(steps))), columns))[0]
    low, high = figure.traces[:2]
    assert min(low["y"]) >= min(map(min, steps)) - 1e-3
    assert max(high["y"]) <= max(map(max, steps)) + 1e-3
    assert all(below <= above + 1e-3 for below, above in zip(low["y"], high["y"], strict=True))


def test_each_reward_has_a_figure_of_its_quantiles_and_no_statistic_is_a_reward() -> None:
    """Catches an area of quantiles with other edges, and p10 among the lines of reward functions."""
    statistics = {"/p10": (0.0, 0.1, 0.2), "/p50": (0.5, 0.5, 0.6), "/p90": (1.0, 2.0, 3.0), "/ties": (0.5, 0.5, 0.1)}
    columns = {"reward/mean": (0.5, 0.6, 0.7), "reward/a": (0.4, 0.5, 0.6), "reward/b": (1.0, 2.0, 1.0)}
    columns |= {f"reward/a{name}": values for name, values in statistics.items()} | {"reward/c/error_share": (1.0,) * 3}
    metrics = Metrics((1, 2, 3), columns)
    assert reward_functions(metrics) == ["reward/a", "reward/b"]
    by_title = {figure.title: figure for figure in build_figures(metrics)[0]}
    assert [entry.label for entry in by_title["Reward functions"].legend] == ["a", "b"]
    values = by_title["Values of a"]
    go.Figure({"data": values.spec["data"], "layout": values.spec["layout"]})
    assert [tuple(trace["y"]) for trace in values.traces] == [
        *(statistics[f"/p{p}"] for p in (10, 90, 50)),
        columns["reward/a"],
    ]
    assert [entry.label for entry in values.legend] == ["median", "mean", "80% of the samples"]
    assert "Values of b" not in by_title


def test_a_critic_has_figures_and_nothing_of_it_is_missed_without_one() -> None:
    columns = {"critic/explained_variance": (-0.5, 0.25, 0.75), "critic/loss": (2.0, 0.1, 0.01)}
    figures, _ = build_figures(Metrics((1, 2, 3), columns))
    by_title = {figure.title: figure for figure in figures}
    explained = by_title["Explained variance of the critic"]

    assert [trace["y"] for trace in explained.traces][-1] == [-0.5, 0.25, 0.75]
    assert explained.spec["layout"]["yaxis"]["range"] == [-1, 1.05]
    assert "Loss of the critic" in by_title
    _, absent = build_figures(Metrics((1,), {"reward/mean": (0.5,)}))
    assert not any("critic" in name.lower() for name in absent)


def test_smoothing_keeps_a_line_and_thinning_keeps_extremes_and_means() -> None:
    line = Series(tuple(range(5000)), tuple(2.0 * step for step in range(5000)))
    assert smooth(line).values[1000] == pytest.approx(2.0 * smooth(line).steps[1000], abs=4)
    wave = Series(tuple(range(10_000)), tuple(math.sin(step) for step in range(10_000)))
    thin = keep_extremes(wave, 100)
    assert len(thin) <= 100
    assert (min(thin.values), max(thin.values)) == (min(wave.values), max(wave.values))
    assert list(thin.steps) == sorted(thin.steps)
    assert sum(bucket_means(line, 100).values) / 100 == pytest.approx(sum(line.values) / 5000)
    huge = Series(tuple(range(30)), (1.7e308,) * 30)
    assert smooth(huge).values[15] == pytest.approx(1.7e308)


def _record(step: int, uid: str, reward: float | None) -> Candidate:
    return Candidate(step, uid, reward, 0)


def test_best_and_worst_share_no_sample_and_vary_the_prompts_among_ties() -> None:
    ones = [_record(step, uid, 1.0) for step, uid in ((9, "a"), (9, "a"), (8, "b"), (7, "c"))]
    rest = [_record(9, "d", 0.5), _record(9, "e", None), _record(3, "f", 0.0), _record(4, "g", 0.0)]
    best, worst = best_and_worst([*rest, *ones])

    assert [(sample.prompt_uid, sample.reward) for sample in best] == [("a", 1), ("b", 1), ("c", 1), ("a", 1)]
    assert [(sample.prompt_uid, sample.reward) for sample in worst] == [("g", 0), ("f", 0), ("d", 0.5)]
    assert best_and_worst([_record(1, "a", 0.0)]) == ([_record(1, "a", 0.0)], [])


def test_samples_come_from_the_last_quarter(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, num_steps=100)
    samples = read_run(run_dir).samples
    assert samples.late_steps == (75, 95)
    assert {sample.step for sample in (*samples.best, *samples.worst)} <= {75, 80, 85, 90, 95}
    rows = {(row["step"], row["prompt_uid"], row["completion"], row["reward"]) for row in sample_rows(100)}
    chosen = {(s.step, s.prompt_uid, s.completion, s.reward) for s in (*samples.best, *samples.worst)}
    assert len(chosen) > 5
    assert chosen <= rows
    write_samples(run_dir, [row for row in sample_rows(100) if row["step"] <= 30])
    assert read_run(run_dir).samples.late_steps == (30, 30)


def test_a_report_of_many_samples_keeps_no_text_and_loads_no_torch(tmp_path: Path) -> None:
    """Alone catches a report that holds a quarter of all texts for ten, or needs 300 MiB before it reads a line."""
    run_dir = make_run(tmp_path, num_steps=100)
    rows = [{"step": step, "completion": "x" * 100_000, "reward": step % 2} for step in range(1, 101) for _ in range(8)]
    write_samples(run_dir, rows)
    script = (
        "import sys, tracemalloc; from pathlib import Path; from rlplug_watch.report.page import write_report; "
        "from rlplug_watch.report.sample_log import read_samples; assert 'torch' not in sys.modules; "
        "tracemalloc.start(); log = read_samples(Path(sys.argv[1]), range(1, 101), []); "
        "print(log.num_samples, len(log.best) + len(log.worst), tracemalloc.get_traced_memory()[1] >> 20)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(run_dir / "samples.jsonl")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    num_samples, num_shown, peak_mib = map(int, done.stdout.split())
    assert (num_samples, num_shown) == (800, 10)
    assert peak_mib < 5  # the file has 76 MiB


def test_numbers_and_durations_read_well() -> None:
    assert [number(value) for value in (0.71342, 1.0, 12840.2, 0.00412, 1.3e-5, 0.0, -25.25)] == [
        *("0.713", "1", "12,840", "0.00412", "1.3e-05", "0", "-25.2")
    ]
    assert [duration(seconds) for seconds in (0.8, 42, 245, 11_520, 400_000)] == [
        *("0.80 s", "42 s", "4 min 5 s", "3 h 12 min", "4 d 15 h")
    ]


def test_the_last_row_of_a_step_counts(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(lines_of("step,loss,validate/pass@1\n1,5,0.5\n2,6,\n1,7,\n"))
    metrics = read_run(tmp_path).metrics

    assert metrics.steps == (1, 2)
    assert metrics.columns == {"loss": (7.0, 6.0), "validate/pass@1": (0.5, None)}
