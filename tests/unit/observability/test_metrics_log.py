"""``metrics.jsonl`` as a program without rlplug would read it."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplug.distributed.checkpoints.resumed_files import cut_back_metrics
from rlplug.observability.metrics_log import MetricsLog, read_metrics


def refuse_constant(name):
    raise ValueError(f"{name} is not JSON")


def lines(path):
    """Return the objects of the file without the code under test, as strict JSON has them."""
    return [json.loads(line, parse_constant=refuse_constant) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_line_per_step_is_appended(path):
    """Alone catches a file that is rewritten when a metric appears for the first time."""
    logger = MetricsLog(path)
    logger.log_metrics({"b": 1, "flag": True}, step=1)
    before, inode = path.read_bytes(), path.stat().st_ino
    logger.log_metrics({"c": torch.tensor(2.0), "a": 3.5}, step=2)
    assert lines(path) == [{"step": 1, "b": 1, "flag": 1.0}, {"step": 2, "c": 2.0, "a": 3.5}]
    assert path.read_bytes().startswith(before)
    assert path.stat().st_ino == inode


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.1 + 0.2, 5e-324, -0.0, 2**53 + 1])
def test_numbers_and_names_survive_the_format(path, value):
    name = 'reward/"odd", näme\n'
    MetricsLog(path).log_metrics({name: value}, step=1)
    (line,) = lines(path)
    assert repr(float(line[name])) == repr(float(value))
    assert repr(read_metrics(path)) == repr([{"step": 1, name: float(value)}])


def test_what_comes_late_belongs_to_its_step(path):
    """Alone catches scores that make a step of their own, or are lost beside the metrics of their step."""
    logger = MetricsLog(path)
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.log_metrics({"loss": 2.0}, step=2)
    logger.log_metrics({"validate/x": 0.5}, step=1)
    logger.log_metrics({"validate/x": 0.25}, step=0)
    logger.log_metrics({"validate/x": 0.75}, step=1)
    assert read_metrics(path) == [
        {"step": 0, "validate/x": 0.25},
        {"step": 1, "loss": 1.0, "validate/x": 0.75},
        {"step": 2, "loss": 2.0},
    ]


def test_lines_that_are_no_metrics_are_left_out(path):
    path.write_text(
        '{"step": 1, "a": 1}\n{"a": 2}\n[]\n{"step": 2, "a": [2]}\n{"step": 3, "a": "x"}\n{"step": 4, "a": 4'
    )
    assert read_metrics(path) == [{"step": 1, "a": 1.0}]


def test_cut_back(path):
    logger = MetricsLog(path)
    for step in range(1, 6):
        logger.log_metrics({"a": float(step)}, step=step)
    resumed = MetricsLog(path)
    assert cut_back_metrics(path, 3) == []
    assert [line["step"] for line in lines(path)] == [1, 2, 3]
    resumed.log_metrics({"a": 0.0}, step=4)
    assert lines(path)[-1] == {"step": 4, "a": 0.0}
    before = path.stat().st_mtime_ns
    cut_back_metrics(path, 4)
    assert path.stat().st_mtime_ns == before  # nothing to drop, nothing written


def test_scores_that_came_late_are_written_again(path):
    """Alone catches scores that a resumed run has twice, and a step of which nothing but its scores is left."""
    logger = MetricsLog(path)
    for step, metrics in [(1, {"a": 1.0}), (1, {"validate/x": 0.5}), (2, {"validate/x": 0.5})]:
        logger.log_metrics(metrics, step=step)
    assert cut_back_metrics(path, 2) == [f"{path}: rows of step 2 are missing, which the run cannot write again."]
    assert len(lines(path)) == 3
    cut_back_metrics(path, 2, repeats_scores=True)
    assert lines(path) == [{"step": 1, "a": 1.0}, {"step": 1, "validate/x": 0.5}]


@settings(max_examples=150)
@given(
    end=st.integers(0, 500),
    tail=st.one_of(st.binary(max_size=80), st.integers(0, 3000).map(bytes), st.sampled_from([b'{"', b"7,", b"\n\n"])),
    step=st.integers(-1, 12),
)
def test_any_end_of_the_file_is_cut_back(tmp_path_factory, end, tail, step):
    """It catches rows that are lost or kept wrongly, or a tail that ends the run."""
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    logger = MetricsLog(path)
    for number in range(1, 11):
        logger.log_metrics({"a": number / 3, "b": -1.0}, step=number)
    whole = path.read_bytes()
    path.write_bytes(whole[:end] + tail)

    resumed = MetricsLog(path, waits=True)
    resumed.log_metrics({"a": 0.5}, step=step + 1)  # before the run is accepted
    assert path.read_bytes() == whole[:end] + tail
    said = cut_back_metrics(path, step)
    resumed.end_wait()

    steps = [line["step"] for line in lines(path)]
    assert steps[-1] == step + 1
    assert all(number <= step for number in steps[:-1])
    assert any("are missing" in line for line in said) == bool(set(range(1, step + 1)) - set(steps))
    ended = whole[:end].count(b"\n") + (tail.startswith(b"\n") and whole[end : end + 1] == b"\n")
    assert steps[: min(step, ended)] == list(range(1, min(step, ended) + 1))
    assert cut_back_metrics(path, step + 1) == [line for line in said if "are missing" in line]


def test_without_a_file(path):
    assert read_metrics(path) == []
    cut_back_metrics(path, 0)
    assert not path.exists()
