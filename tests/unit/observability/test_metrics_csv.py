"""``metrics.csv`` as a spreadsheet would read it."""

from __future__ import annotations

import csv
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplug.observability.metrics_csv import MetricsCSV


def read(path):
    """Return header and rows, as text, without the code under test."""
    header, *rows = csv.reader(path.read_text().splitlines())
    assert all(len(row) == len(header) for row in rows)
    return header, rows


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.csv"


def test_a_row_per_step(path):
    logger = MetricsCSV(path)
    logger.log_metrics({"loss": 0.5, "a": 2.0}, step=1)
    logger.log_metrics({"a": 3.0, "loss": math.nan}, step=2)
    assert read(path) == (["step", "a", "loss"], [["1", "2.0", "0.5"], ["2", "3.0", "nan"]])
    assert logger.read() == [{"step": "1", "a": "2.0", "loss": "0.5"}, {"step": "2", "a": "3.0", "loss": "nan"}]


def test_new_metrics_become_columns_and_absent_ones_stay_empty(path):
    logger = MetricsCSV(path)
    logger.log_metrics({"b": 1.0}, step=1)
    logger.log_metrics({"c": 2.0, "a": 3.0}, step=2)
    logger.log_metrics({"b": 4.0}, step=3)
    assert read(path) == (
        ["step", "a", "b", "c"],
        [["1", "", "1.0", ""], ["2", "3.0", "", "2.0"], ["3", "", "4.0", ""]],
    )


def test_what_comes_late_is_in_the_row_of_its_step(path):
    """Alone catches scores that make a row of their own, or none where the step has no row yet."""
    logger = MetricsCSV(path)
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.log_metrics({"loss": 2.0}, step=2)
    logger.amend({"validate/x": 0.5}, step=1)
    logger.amend({"validate/x": 0.25}, step=0)
    logger.log_metrics({"loss": 3.0}, step=3)
    rows = [{name: value for name, value in row.items() if value} for row in logger.read()]
    assert rows == [
        {"step": "0", "validate/x": "0.25"},
        {"step": "1", "loss": "1.0", "validate/x": "0.5"},
        {"step": "2", "loss": "2.0"},
        {"step": "3", "loss": "3.0"},
    ]


def test_names_and_values_survive_the_format(path):
    value, name = 0.1 + 0.2, 'reward/"odd", name'
    MetricsCSV(path).log_metrics({name: value}, step=1)
    header, ((_, text),) = read(path)
    assert header == ["step", name]
    assert float(text) == value


def test_a_resumed_run_goes_on_in_the_same_file(path):
    MetricsCSV(path).log_metrics({"a": 1.0, "b": 2.0}, step=1)
    resumed = MetricsCSV(path)
    resumed.log_metrics({"b": 3.0}, step=2)
    resumed.log_metrics({"a": 4.0, "c": 5.0}, step=3)
    assert read(path) == (
        ["step", "a", "b", "c"],
        [["1", "1.0", "2.0", ""], ["2", "", "3.0", ""], ["3", "4.0", "", "5.0"]],
    )


def test_cut_back(path):
    logger = MetricsCSV(path)
    for step in range(8, 13):
        logger.log_metrics({"a": float(step)}, step=step)
    resumed = MetricsCSV(path)
    resumed.cut_back(10)
    assert [row[0] for row in read(path)[1]] == ["8", "9", "10"]
    resumed.log_metrics({"a": 0.0}, step=11)
    assert read(path)[1][-1] == ["11", "0.0"]
    before = path.stat().st_mtime_ns
    resumed.cut_back(11)
    assert path.stat().st_mtime_ns == before  # nothing to drop, nothing written


@settings(max_examples=150)
@given(
    end=st.integers(0, 400),
    tail=st.one_of(st.binary(max_size=80), st.integers(0, 3000).map(bytes), st.sampled_from([b'"', b"7,", b"\n\n"])),
    step=st.integers(-1, 12),
)
def test_any_end_of_the_file_is_cut_back(tmp_path_factory, end, tail, step):
    """It catches rows that are lost or kept wrongly, or a tail that ends the run."""
    path = tmp_path_factory.mktemp("metrics") / "metrics.csv"
    logger = MetricsCSV(path)
    for number in range(1, 11):
        logger.log_metrics({"a": number / 3, "b": -1.0}, step=number)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(whole[:end] + tail)
    is_header = (whole[:end] + tail).startswith(lines[0])

    resumed = MetricsCSV(path, waits=True)
    resumed.log_metrics({"a": 0.5}, step=step + 1)  # before the run is accepted
    assert path.read_bytes() == whole[:end] + tail
    said = resumed.cut_back(step)

    steps = [int(row["step"]) for row in resumed.read()]
    assert steps[-1] == step + 1
    assert all(number <= step for number in steps[:-1])
    assert any("are missing" in line for line in said) == bool(set(range(1, step + 1)) - set(steps))
    if is_header:
        kept = [
            line
            for number, line in enumerate(lines[1:], 1)
            if number <= step and len(b"".join(lines[: number + 1])) <= end
        ]
        assert path.read_bytes().startswith(b"".join([lines[0], *kept]))
    assert MetricsCSV(path).cut_back(step + 1) == [line for line in said if "are missing" in line]


@pytest.mark.parametrize("header", [b"", b"\0" * 9, b"step,loss\xff\r\n", b"stop,loss\r\n1,2\r\n", b"step,a,a\r\n"])
def test_a_file_without_its_header_goes_aside(path, header):
    path.write_bytes(header)
    resumed = MetricsCSV(path, waits=True)
    assert resumed.cut_back(0) == [f"{path}: its first line is damaged, so it is now metrics.damaged.csv."]
    assert path.with_name("metrics.damaged.csv").read_bytes() == header
    resumed.log_metrics({"a": 1.0}, step=1)
    assert read(path) == (["step", "a"], [["1", "1.0"]])


def test_drop_everything_keeps_the_header(path):
    logger = MetricsCSV(path)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.cut_back(0)
    assert read(path) == (["step", "a"], [])
    logger.log_metrics({"a": 2.0}, step=1)
    assert read(path) == (["step", "a"], [["1", "2.0"]])


def test_without_a_file(path):
    logger = MetricsCSV(path)
    assert logger.read() == []
    logger.cut_back(3)
    assert not path.exists()


def test_no_partial_file_stays(path):
    logger = MetricsCSV(path)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.log_metrics({"b": 1.0}, step=2)
    assert list(path.parent.iterdir()) == [path]
