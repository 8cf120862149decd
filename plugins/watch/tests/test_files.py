"""What ``rlplug watch`` reads of files that grow, are torn or hostile."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from report_runs import RUN, lines_of, make_run, write_metrics
from rlplug_watch import metrics_file
from rlplug_watch.metrics_file import MetricsFile
from rlplug_watch.page.curves import read_curve, read_rough_curve, thin
from rlplug_watch.page.run import WatchedRun
from rlplug_watch.report.run_data import read_run

pytest.importorskip("plotly")

HOLD_LOCK = (
    "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True); input()"
)


def watched(folder: Path) -> WatchedRun:
    return WatchedRun(folder, lambda name: folder / name if (folder / name).is_file() else None)


def test_rows_are_read_once_whole_and_again_when_the_file_is_another(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(lambda: path)
    assert file.names() == []
    path.write_text('{"step": 1, "a": 0.5}\n{"step": 2, "a": 0.')
    assert file.columns(["a"])["a"].tolist() == [0.5]  # a torn line waits
    with path.open("a") as more:
        more.write('75, "b": 3}\n{"step": 3, "b": "x", "a": "NaN"}\n4\n{"a": 9, "b": 9}\n')
    columns = file.columns(["a", "b", "absent"])
    assert columns["step"].tolist() == [1, 2, 3]
    assert columns["a"].tolist() == [0.5, 0.75, math.inf]
    assert np.array_equal(columns["b"], [math.nan, 3, math.inf], equal_nan=True)
    assert file.num_damaged == 2

    other = tmp_path / "other.jsonl"
    other.write_text('{"step": 1, "a": 9, "b": 9, "c": 9}\n')
    other.replace(path)  # as a run does that resumes
    assert file.columns(["a", "c"])["c"].tolist() == [9]
    path.write_text('{"step": 5, "a": 1}\n')  # shorter, in place
    assert {name: column.tolist() for name, column in file.columns(["a", "c"]).items()} == {"step": [5], "a": [1]}


def test_lines_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a page that follows a long run and parses all of it again at every step."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines_of("step,a\n1,1\n2,2\n"))
    file = MetricsFile(lambda: path)
    assert file.columns(["a"])["a"].tolist() == [1, 2]
    parsed: list[bytes] = []
    parse = metrics_file._parse
    monkeypatch.setattr(metrics_file, "_parse", lambda line: parsed.append(line) or parse(line))
    with path.open("a") as more:
        more.write(lines_of("step,a\n3,3\n"))
    assert file.columns(["a"])["a"].tolist() == [1, 2, 3]
    assert len(parsed) == 1


def test_the_page_of_a_run_has_the_metrics_of_its_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=40)
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:31], *lines[20:25], *lines[31:]]) + "\n")  # steps that a resumed run wrote again

    ours, theirs = watched(run).data().metrics, read_run(run).metrics
    assert ours.steps == theirs.steps
    assert ours.columns == theirs.columns
    assert watched(run).metrics.latest() == {
        name: [value for value in column if value is not None][-1] for name, column in theirs.columns.items()
    } | {"step": float(theirs.steps[-1])}


def test_the_newest_values_need_only_the_end_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines_of("step,a,b\n1,7,7\n" + "".join(f"{step},{step / 2},\n" for step in range(2, 20_000))))
    monkeypatch.setattr(MetricsFile, "columns", None)
    assert MetricsFile(lambda: path).latest() == {"step": 19_999, "a": 9999.5}
    steps, values = MetricsFile(lambda: path).sampled("a", 40)
    assert steps[0] == 1
    assert steps[-1] > 19_000
    assert 30 <= len(steps) <= 40
    assert values[1:].tolist() == (steps[1:] / 2).tolist()


def test_the_newest_validation_is_found_however_long_ago_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone catches a list of runs that shows Pass@1 for some steps after each validation, and nothing between."""
    monkeypatch.setattr(metrics_file, "TAIL_BYTES", 100)
    monkeypatch.setattr(metrics_file, "BLOCK_BYTES", 64)  # so that lines begin in one block and end in another
    path, name = tmp_path / "metrics.jsonl", "validate/pass@1"
    file = MetricsFile(lambda: path)
    assert file.latest([name]) == {}

    def write(first: int, last: int, at: int = 0, value: float | str = 0.0) -> None:
        with path.open("a") as more:
            for step in range(first, last):
                more.write(json.dumps({"step": step, "a": step} | ({name: value} if step == at else {})) + "\n")

    def newest() -> float | None:
        return file.latest([name]).get(name)

    write(1, 40)
    assert newest() is None
    write(40, 80, 40, 0.25)
    assert newest() == 0.25
    write(80, 120)
    assert newest() == 0.25
    write(120, 160, 125, "NaN")
    assert newest() == 0.25
    write(160, 200, 170, 0.5)
    with path.open("a") as more:
        more.write('{"step": 200, "validate/pass@1": 0.')  # torn
    assert newest() == 0.5
    with path.open("a") as more:
        more.write("75}\n")
    write(201, 240)
    assert newest() == 0.75
    other = tmp_path / "other"
    other.write_text('{"step": 1, "a": 1}\n')
    other.replace(path)  # as a run does that resumes
    assert newest() is None


def test_thinned_curves_keep_extremes_and_the_mean() -> None:
    x, y = np.arange(10_001.0), np.random.default_rng(0).normal(size=10_001)
    y[[17, 9000]] = 50, -60
    curve = thin(x, y, 100)

    assert len(curve.x) <= 200
    assert (17, 50) in zip(curve.x, curve.y, strict=True)
    assert (9000, -60) in zip(curve.x, curve.y, strict=True)
    assert len(curve.mean_y) == 100
    assert np.mean(curve.mean_y) == pytest.approx(y.mean(), abs=1e-3)
    assert curve.x == sorted(curve.x)


def test_a_rough_curve_is_of_some_rows_until_the_column_is_read(tmp_path: Path) -> None:
    """Would catch a first look at many runs that reads their files whole, or points that no row has."""
    path = tmp_path / "metrics.jsonl"
    write_metrics(tmp_path, [{"step": step, "reward/mean": step / 1000} for step in range(1, 5001)])
    file = MetricsFile(lambda: path)
    rough = read_rough_curve(file, "reward/mean", "samples", 8, 400)
    assert not file.is_read
    assert rough is not None
    assert 50 < len(rough.x) <= 100
    assert all(y == pytest.approx(x / 8000) for x, y in zip(rough.x, rough.y, strict=True))
    assert read_rough_curve(file, "reward/mean", "seconds", 8, 400) is None

    whole = read_curve(file, "reward/mean", "step", None, 400)
    assert read_rough_curve(file, "reward/mean", "step", None, 400) == whole


def test_sums_along_an_axis_count_a_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines_of("step,reward/mean,time/step\n1,0.1,10\n2,0.2,10\n3,0.3,10\n2,0.5,4\n3,,4\n4,0.6,\n"))
    curve = read_curve(MetricsFile(lambda: path), "reward/mean", "seconds", None, 100)

    assert curve is not None
    assert curve.y == [0.1, 0.5, 0.3, 0.6]
    assert curve.x == [10, 14, 18, 18]
    assert read_curve(MetricsFile(lambda: path), "reward/mean", "samples", None, 100) is None


def test_a_run_whose_process_is_gone_is_killed(tmp_path: Path) -> None:
    """Catches a page, or a report, that shows a dead run as one that goes on."""
    run = make_run(tmp_path / "run", num_steps=3)
    (run / "run.json").write_text(json.dumps({**RUN, "status": "unfinished"}))
    assert watched(run).status() == "unfinished"  # on a system without locks
    lock = run / "run.lock"
    with subprocess.Popen(
        [sys.executable, "-SEc", HOLD_LOCK, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        assert watched(run).status() == "running"
        owner.kill()
    assert watched(run).status() == "killed"
    assert read_run(run).info["status"] == "killed"


def test_a_configuration_that_unfolds_without_end_is_left_out(tmp_path: Path) -> None:
    bomb = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 25))
    (tmp_path / "config.yaml").write_text(bomb)
    assert watched(tmp_path).config() == {}
    (tmp_path / "config.yaml").write_text("loop: &loop {again: *loop}\n")
    assert watched(tmp_path).config() == {}
    (tmp_path / "config.yaml").write_text("[" * 200_000 + "]" * 200_000)  # on which libyaml's loader ends the process
    assert watched(tmp_path).config() == {}


def test_secrets_of_a_configuration_are_not_shown(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=1)
    (tmp_path / "config.yaml").write_text("model: {judge: {api_key: sesame, url: 'https://me:sesame@host/v1'}}\n")
    assert "sesame" not in str(watched(tmp_path).config())
    assert "sesame" not in watched(tmp_path).data().config
    assert "https://***@host/v1" in watched(tmp_path).data().config
