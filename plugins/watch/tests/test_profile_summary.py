"""The summary of a trace, against one that was worked out by hand, and against counting on a grid."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from rlplug_watch.profile.summary import DeviceTime, Event, Gap, RangeTime, Span, Summary, read_trace, summarize
from rlplug_watch.profile.text import headlines, summary_text

US = 1e-6
ORIGIN = 4_443_317_743_000.0
"""Real traces count from days ago: what is left of a double's digits is a nanosecond."""


def event(category: str, name: str, start: float, end: float, thread: int = 1) -> dict[str, Any]:
    """Return an event as torch writes it; times are in microseconds."""
    common = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread, "args": {"External id": 1}}
    return common | {"ts": ORIGIN + start, "dur": end - start}


RANGES = [
    event("user_annotation", "rlplug/update", 2100, 3100),
    event("user_annotation", "FSDP::pre_forward", 2110, 2120),
    event("user_annotation", "rlplug/rollout", 1000, 2000),
    event("user_annotation", "rlplug/engine/generate", 1200, 1900),
    event("gpu_user_annotation", "rlplug/update", 2150, 3000),
]
DEVICE_WORK = [
    event("kernel", "attention", 2600, 3000, thread=7),
    event("kernel", "warm-up", 900, 950, thread=7),
    event("kernel", "gemm", 1300, 1500, thread=7),
    event("gpu_memcpy", "copy", 1400, 1600, thread=8),  # beside the kernel, and longer
    event("kernel", "gemm", 1800, 1850, thread=7),
    event("gpu_memset", "fill", 2150, 2250, thread=8),
    event("kernel", "gemm", 2160, 2200, thread=7),  # while the other stream fills
]
OPERATORS = [
    event("cpu_op", "addmm", 1100, 1400),
    event("cpu_op", "linear", 1000, 1500),
    event("cpu_op", "copy_", 1150, 1200),
    event("cpu_op", "relu", 1500, 1600),
    event("cpu_op", "score", 1200, 1700, thread=2),
    event("cpu_op", "addmm", 2200, 2300),
    event("cpu_op", "before", 10, 900),
]
OTHERS = [
    {"ph": "M", "name": "process_name", "ts": ORIGIN, "pid": 0, "tid": 0, "args": {"name": "python"}},
    event("cuda_runtime", "cudaLaunchKernel", 1000, 2900),
    {"ph": "s", "id": 1, "pid": 0, "tid": 1, "ts": ORIGIN + 1300, "cat": "ac2g", "name": "ac2g"},
    event("Trace", "PyTorch Profiler (0)", 0, 9000),
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    content = {"schemaVersion": 1, "deviceProperties": [{"id": 0}]}
    path.write_text(json.dumps(content | {"traceEvents": [*OTHERS, *OPERATORS, *DEVICE_WORK, *RANGES]}, indent=1))
    return path


@pytest.fixture
def summary(trace: Path) -> Summary:
    return summarize(read_trace(trace, has_device=True), has_device=True)


def near(row: RangeTime) -> RangeTime:
    """Return a row that a computed one equals, up to the digits that the trace has."""
    busy: Any = None if row.busy is None else pytest.approx(row.busy, abs=0.01 * US)
    seconds: Any = pytest.approx(row.seconds, abs=0.01 * US)
    return RangeTime(row.name, row.count, seconds, busy)


def test_no_more_is_kept_than_needed(trace):
    on_device, on_cpu = read_trace(trace, has_device=True), read_trace(trace, has_device=False)
    ranges = {item["name"] for item in RANGES}
    assert {item.name for item in on_device} == {item["name"] for item in DEVICE_WORK} | ranges
    assert {item.name for item in on_cpu} == {item["name"] for item in OPERATORS} | ranges
    assert len(on_device) == len(DEVICE_WORK) + 4  # not the range that the GPU's timeline repeats


def test_busy_time_counts_overlapping_streams_once(summary):
    assert summary.phases == [
        near(RangeTime("rollout", 1, 1000 * US, (300 + 50) * US)),
        near(RangeTime("rollout/generate", 1, 700 * US, 350 * US)),
        near(RangeTime("update", 1, 1000 * US, (100 + 400) * US)),
        near(RangeTime("between phases", 1, 100 * US, 0.0)),
        near(RangeTime("all", 1, 2100 * US, 850 * US)),
    ]


def test_kernels_are_ordered_by_their_time_with_shares_of_the_busy_time(summary):
    rows = {group: [(c.name, c.count, c.seconds, c.share) for c in costs] for group, costs in summary.costs.items()}
    expected = {
        "all": [("attention", 1, 400, 850), ("gemm", 3, 290, 850), ("copy", 1, 200, 850), ("fill", 1, 100, 850)],
        "rollout": [("gemm", 2, 250, 350), ("copy", 1, 200, 350)],
        "update": [("attention", 1, 400, 500), ("fill", 1, 100, 500), ("gemm", 1, 40, 500)],
    }
    assert rows.keys() == expected.keys()  # what ran before the first phase is in none
    for group, costs in expected.items():
        assert [row[:2] for row in rows[group]] == [cost[:2] for cost in costs]
        assert [row[2] for row in rows[group]] == pytest.approx([taken * US for _, _, taken, _ in costs], abs=0.01 * US)
        assert [row[3] for row in rows[group]] == pytest.approx([taken / busy for _, _, taken, busy in costs], abs=1e-4)


def test_collectives_count_where_nothing_else_runs():
    """It catches collectives beside kernels that count as waits, and those of two streams that count twice."""
    events = [
        Event("user_annotation", "rlplug/update", 0, 10),
        Event("kernel", "gemm", 1, 4),
        Event("kernel", "ncclDevKernel_AllGather_RING_LL(...)", 2, 6),
        Event("kernel", "ncclDevKernel_ReduceScatter_Sum_f32(...)", 5, 7),
        Event("gpu_memcpy", "copy", 6.5, 8),
    ]
    summary = summarize(events, has_device=True)
    assert summary.phases[0] == RangeTime("update", 1, 10, 7.0, collectives=5.0, exposed=2.5)
    lines = [line.split() for line in summary_text(summary, "").splitlines()]
    assert ["update", "1", "10.0000", "7.0000", "3.0000", "70.0%", "5.0000", "2.5000"] in lines
    assert any(line.startswith("collectives: 25% of the time") for line in headlines(summary))


def test_gaps_say_where_they_are_and_what_is_around(summary):
    found = [(round(gap.seconds / US), gap.phase, gap.before, gap.after) for gap in summary.gaps]
    assert found[:4] == [
        (350, "update", "fill", "attention"),  # the kernel beside the fill ends before it does
        (300, "rollout", "warm-up", "gemm"),
        (200, "rollout", "copy", "gemm"),
        (150, "rollout", "gemm", "fill"),
    ]
    assert sorted(found[4:]) == [
        (50, "update", "gemm", "fill"),
        (100, "between phases", "gemm", "fill"),
        (100, "update", "attention", None),
    ]


def test_without_a_device_operators_count_without_those_that_they_call(trace):
    summary = summarize(read_trace(trace, has_device=False), has_device=False)
    found = {group: [(c.name, c.count, round(c.seconds / US)) for c in costs] for group, costs in summary.costs.items()}
    assert found["rollout"] == [
        *(("score", 1, 500), ("addmm", 1, 250), ("linear", 1, 200), ("relu", 1, 100), ("copy_", 1, 50)),
    ]
    assert found["update"] == [("addmm", 1, 100)]
    assert found["all"][:2] == [("score", 1, 500), ("addmm", 2, 350)]
    assert summary.costs["rollout"][0].share == pytest.approx(500 / 1100, abs=1e-4)
    assert (summary.gaps, {row.busy for row in summary.phases}) == ([], {None})


@pytest.mark.parametrize("seed", range(20))
def test_busy_time_and_gaps_are_those_of_a_grid(seed):
    random.seed(seed)
    bounds = [sorted(random.sample(range(200), 2)) for _ in range(random.choice([0, 1, 5, 25]))]
    device = DeviceTime([Event("kernel", f"{start}-{end}", start, end) for start, end in bounds])
    is_busy = [any(start <= cell < end for start, end in bounds) for cell in range(200)]
    for start, end in [(0, 200), (0, 1), *(sorted(random.sample(range(200), 2)) for _ in range(20))]:
        cells = "".join("x" if busy else "." for busy in is_busy[start:end])
        assert device.busy(start, end) == cells.count("x")
        gaps = list(device.gaps([Span(start, end, "update")]))
        lengths = sorted(len(gap) for gap in cells.split("x") if gap)
        assert sorted(gap.seconds for gap in gaps) == lengths[-12:]
        assert all(gap.before is None or int(gap.before.partition("-")[2]) <= end for gap in gaps)


def test_the_text_has_every_part(trace):
    events = read_trace(trace, has_device=True)
    slow = [e._replace(start=(e.start - ORIGIN * US) * 1000, end=(e.end - ORIGIN * US) * 1000) for e in events]
    summary = summarize(slow, has_device=True)
    text = summary_text(summary, "Profile of steps 5-7.")
    lines = [line.split() for line in text.splitlines()]
    assert text.startswith("Profile of steps 5-7.\nProfiling takes time")
    assert ["update", "1", "1.0000", "0.5000", "0.5000", "50.0%"] in lines
    assert ["generate", "1", "0.7000", "0.3500", "0.3500", "50.0%"] in lines
    assert ["0.2900", "34.1%", "3", "gemm"] in lines
    assert lines[lines.index(["0.3500", "update", "fill"]) + 1] == ["attention"]
    titles = [line.partition(";")[0] for line in text.splitlines() if line.startswith("Costliest")]
    assert titles == [f"Costliest kernels, copies and fills in {name}" for name in ("all phases", "rollout", "update")]
    assert list(headlines(summary)) == [
        "2.1 s (device busy 40%): rollout 48% (device busy 35%), update 48% (device busy 50%)",
        "costliest kernel: attention, 47% of the device's busy time",
        "longest idle gap of the device: 0.35 s in update",
    ]


def test_long_names_are_cut_in_the_text_alone():
    name = "void at::native::vectorized_elementwise_kernel<" + "4, " * 100
    events = [Event("user_annotation", "rlplug/update", 0, 9), Event("kernel", name, 1, 2)]
    summary = summarize(events, has_device=True)
    assert summary.costs["update"][0].name == name
    assert name not in summary_text(summary, "")
    assert f"{name[:97]}..." in summary_text(summary, "")


def test_a_trace_without_work_of_the_gpu_says_so():
    summary = summarize([Event("user_annotation", "rlplug/update", 0, 9)], has_device=True)
    assert summary.phases[0] == RangeTime("update", 1, 9, 0.0)
    assert summary.gaps == [Gap(9.0, "update", None, None)]
    assert "The trace has no GPU work" in summary_text(summary, "")
