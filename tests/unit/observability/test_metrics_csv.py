"""``metrics.csv`` as a spreadsheet would read it."""

from __future__ import annotations

import csv
import math

import pytest

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
