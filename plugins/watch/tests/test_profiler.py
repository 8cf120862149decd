"""Which steps are profiled, and the window that Nsight Systems is shown."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rlplug_watch.profile.memory_history import peaks, timeline
from rlplug_watch.profile.profiler import StepTracer, compress, parse_steps
from rlplug_watch.profile.summary import Span

from rlplug.errors import ConfigError, RLPlugError
from rlplug.observability.phase_timer import trace_range
from rlplug.plugin_manager import PluginManager
from rlplug.recording import profiler
from rlplug.recording.profiler import StepProfiler
from rlplug.types import GIB


@pytest.mark.parametrize(
    ("text", "steps"), [("5", (5, 5)), ("5-7", (5, 7)), ("7-7", (7, 7)), ("9-10", (9, 10)), (" 12 ", (12, 12))]
)
def test_a_step_or_a_range_with_both_ends(text, steps):
    assert parse_steps(text) == steps
    assert StepTracer(text).steps == steps


def test_yaml_s_number_is_a_step_and_null_is_none():
    (callback,) = StepProfiler(5).callbacks
    assert isinstance(callback, StepTracer)
    assert callback.steps == (5, 5)
    assert StepProfiler().callbacks == []


def test_without_the_plugin_the_option_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "plugins", lambda: PluginManager(["watch"]))
    with pytest.raises(ConfigError, match=r"^profile\.steps comes with rlplug-watch: plugin .watch. is blocked"):
        StepProfiler(5)


def test_a_plugin_that_makes_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplug_watch.profile.profiler.StepTracer", lambda *options: 7)
    with pytest.raises(RLPlugError, match=r"rlplug-watch .* an instance of Callback, or None; it returned int 7"):
        StepProfiler(5)


@pytest.mark.parametrize("text", ["", "0", "0-3", "7-5", "5-", "-5", "5:7", "5-7-9", "a", "1.5", "5 7"])
def test_anything_else_is_a_mistake_in_the_configuration(text):
    with pytest.raises(ConfigError, match=r"profile\.steps is .*such as 5 or 5-7\."):
        StepProfiler(text)


def run(
    profiler: StepTracer,
    num_steps: int,
    done: int = 0,
    rank: int = 0,
    should_stop_in: int = 0,
    run_dir: Path | None = None,
) -> None:
    """Take the steps of a run as Lightning would, with a phase in each."""
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cuda")),
        is_global_zero=rank == 0,
        global_rank=rank,
        should_stop=False,
    )
    module: Any = SimpleNamespace(plan=SimpleNamespace(total_steps=num_steps), rollout_step=done, run_dir=run_dir)
    profiler.setup(trainer, module, "fit")
    profiler.on_train_start(trainer, module)
    while module.rollout_step < num_steps and not trainer.should_stop:
        profiler.on_train_batch_start(trainer, module, None, 0)
        with trace_range(f"update {module.rollout_step + 1}"):
            pass
        module.rollout_step += 1
        trainer.should_stop = module.rollout_step in (should_stop_in, num_steps)
        profiler.on_train_batch_end(trainer, module, None, None, 0)


@pytest.fixture
def nsys(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Nsight Systems is told, in order; no GPU is needed to tell it."""
    seen = mock.Mock()
    for name in ("profiler.start", "profiler.stop", "nvtx.range"):
        module = getattr(torch.cuda, name.partition(".")[0])
        told = mock.MagicMock() if name == "nvtx.range" else mock.Mock()
        seen.attach_mock(told, name.partition(".")[2])
        monkeypatch.setattr(module, name.partition(".")[2], told)
    calls: list[Any] = seen.mock_calls
    return calls


def window(steps: list[int]) -> list[Any]:
    ranges = [
        call
        for step in steps
        for call in (
            mock.call.range(f"rlplug/update {step}"),
            mock.call.range().__enter__(),
            mock.call.range().__exit__(None, None, None),
        )
    ]
    return [mock.call.start(), *ranges, mock.call.stop()]


@pytest.mark.parametrize(
    ("steps", "options", "shown"),
    [
        ("2-3", {"num_steps": 4}, [2, 3]),
        ("1", {"num_steps": 1}, [1]),
        ("2-4", {"num_steps": 4, "done": 2}, [3, 4]),  # resumed among them
        ("2-4", {"num_steps": 4, "should_stop_in": 3}, [2, 3]),  # Ctrl-C
    ],
)
def test_nsys_is_shown_these_steps_and_no_other(nsys, steps, options, shown):
    run(StepTracer(steps, tool="nsys"), **options)
    assert nsys == window(shown)


@pytest.mark.parametrize(("steps", "options"), [("1-2", {"done": 2}), ("2", {"rank": 1})])
def test_nothing_is_profiled(nsys, steps, options):
    run(StepTracer(steps, tool="nsys"), num_steps=4, **options)
    assert nsys == []


def test_every_rank_is_profiled_on_request(nsys):
    run(StepTracer("2", tool="nsys", ranks="all"), num_steps=4, rank=1)
    assert nsys == window([2])


def test_an_error_closes_the_window(nsys):
    profiler = StepTracer("1-2", tool="nsys")
    fails = mock.patch.object(profiler, "on_train_batch_end", side_effect=ValueError("broken"))
    with fails, pytest.raises(ValueError, match="broken"):
        run(profiler, num_steps=2)
    profiler.on_exception(mock.Mock(), mock.Mock(), ValueError("broken"))
    assert nsys == window([1])


def event(seconds: float, action: str, gib: float) -> dict[str, Any]:
    return {"action": action, "size": int(gib * GIB), "time_us": int(seconds * 1e6)}


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator is told, in order: it has 3 GiB, of which 2 were allocated while it recorded."""
    told: list[str] = []
    history = [[event(1, "alloc", 2), event(1, "segment_alloc", 9)]]
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda enabled="all", **options: told.append("stop" if enabled is None else "record"),
    )
    snapshot = lambda: told.append("snapshot") or {"device_traces": history}  # type: ignore[func-returns-value]  # noqa: E731
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", snapshot)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * GIB)
    return told


def test_a_snapshot_is_taken_before_the_recording_ends(allocator, tmp_path: Path, capsys) -> None:
    """Catches one that is empty: torch drops what it recorded when the recording ends."""
    run(StepTracer("2-3", tool="memory"), num_steps=4, run_dir=tmp_path)

    assert allocator == ["record", "snapshot", "stop"]
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        *("steps-2-3.rank-0.memory.csv", "steps-2-3.rank-0.memory.pickle"),
    ]
    assert "memory of steps 2-3, GiB allocated at the most: between phases 3.0" in capsys.readouterr().out


@pytest.mark.parametrize(("error", "has_snapshot"), [(torch.OutOfMemoryError("no"), True), (ValueError("no"), False)])
def test_an_error_by_lack_of_memory_takes_a_snapshot(allocator, tmp_path: Path, error, has_snapshot) -> None:
    profiler = StepTracer("1-2", tool="memory")
    with mock.patch.object(profiler, "on_train_batch_end", side_effect=error), pytest.raises(type(error)):
        run(profiler, num_steps=2, run_dir=tmp_path)
    module = SimpleNamespace(run_dir=tmp_path, step=1)
    profiler.on_exception(SimpleNamespace(global_rank=1), module, error)  # type: ignore[arg-type]

    assert allocator == ["record", *["snapshot"] * has_snapshot, "stop"]
    snapshot = tmp_path / "profile" / "steps-1.rank-1.out-of-memory.pickle"
    assert snapshot.exists() == has_snapshot
    assert [str(snapshot) in note for note in getattr(error, "__notes__", [])] == [True] * has_snapshot


def test_a_timeline_has_the_most_of_each_phase() -> None:
    """Catches levels counted from zero, and a release counted twice: once when asked for, once when done."""
    events = [
        *(event(10, "alloc", 4), event(11, "alloc", 8), event(11.1, "free_requested", 8)),
        *(event(11.2, "free_completed", 8), event(30, "alloc", 1), event(31, "oom", 50)),
    ]
    found = timeline(events, 7 * GIB, [Span(9, 10.5, "sync"), Span(10.9, 12, "update")])
    assert [(round(each.seconds, 1), each.phase, each.num_bytes / GIB) for each in found] == [
        *((0, "sync", 6), (1, "update", 14), (1.1, "update", 6), (20, "between phases", 7)),
    ]
    assert peaks(found) == "update 14.0, between phases 7.0, sync 6.0"
    assert timeline([], 0, []) == []


@pytest.mark.parametrize("tool", ["nsys", "memory"])
def test_what_records_gpus_is_refused_on_a_cpu(tool: str) -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))
    with pytest.raises(
        ConfigError, match=rf"profile\.tool is {tool}, .* this run is on cpu: set profile\.tool to torch"
    ):
        StepTracer("2", tool=tool).setup(trainer, mock.Mock(), "fit")


def test_steps_past_the_run_s_end_are_a_mistake():
    with pytest.raises(ConfigError, match=r"profile\.steps is '3-5', but the run's last step is 4"):
        run(StepTracer("3-5"), num_steps=4)


def test_compressing_replaces_the_file(tmp_path: Path):
    path = tmp_path / "trace.json"
    path.write_text("[]" * 1000)
    compressed = compress(path)
    assert [compressed] == list(tmp_path.iterdir())
    assert gzip.decompress(compressed.read_bytes()) == b"[]" * 1000
