"""Which steps are profiled, and the window that Nsight Systems is shown."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rlplug_watch.profile.profiler import StepTracer, compress, parse_steps

from rlplug.errors import ConfigError, RLPlugError
from rlplug.observability.phase_timer import trace_range
from rlplug.plugin_manager import PluginManager
from rlplug.recording import profiler
from rlplug.recording.profiler import StepProfiler


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


def run(profiler: StepTracer, num_steps: int, done: int = 0, rank: int = 0, should_stop_in: int = 0) -> None:
    """Take the steps of a run as Lightning would, with a phase in each."""
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cuda")), is_global_zero=rank == 0, should_stop=False
    )
    module: Any = SimpleNamespace(plan=SimpleNamespace(total_steps=num_steps), rollout_step=done)
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


def test_steps_past_the_run_s_end_are_a_mistake():
    with pytest.raises(ConfigError, match=r"profile\.steps is '3-5', but the run's last step is 4"):
        run(StepTracer("3-5"), num_steps=4)


def test_compressing_replaces_the_file(tmp_path: Path):
    path = tmp_path / "trace.json"
    path.write_text("[]" * 1000)
    compressed = compress(path)
    assert [compressed] == list(tmp_path.iterdir())
    assert gzip.decompress(compressed.read_bytes()) == b"[]" * 1000
