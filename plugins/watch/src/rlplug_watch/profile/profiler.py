"""Profiler of a few RL steps: writes a trace, which observers summarize, or memory, or marks them for Nsight."""

from __future__ import annotations

import gzip
import re
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from lightning.pytorch import Callback, Trainer
from torch.profiler import ProfilerActivity, profile, record_function

from rlplug.distributed.durable_files import replaced
from rlplug.errors import ConfigError
from rlplug.interfaces import ProfiledSteps
from rlplug.interfaces.memory_plan import out_of_memory
from rlplug.observability.phase_timer import ranges_made_by
from rlplug.observability.terminal import say
from rlplug_watch.profile.memory_history import VIEWER, MemoryHistory, peaks

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

FOLDER: Final = "profile"
_STEPS: Final = re.compile(r"([1-9]\d*)(?:-([1-9]\d*))?")


class StepTracer(Callback):
    """Profiler of some steps, with the options of ``rlplug.recording.profiler.StepProfiler``."""

    def __init__(self, steps: str, tool: str = "torch", ranks: str = "first") -> None:
        self.steps = parse_steps(steps)
        self.tool = tool
        self.ranks = ranks
        self._first = self._last = 0
        """Steps to profile; 0 if this process profiles none."""
        self._running: ExitStack | None = None
        self._profile: profile | None = None
        self._memory: MemoryHistory | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        device = trainer.strategy.root_device
        if stage == "fit" and self.tool != "torch" and device.type != "cuda":
            raise ConfigError(
                f"profile.tool is {self.tool}, which records GPUs, and this run is on {device}: set profile.tool to "
                "torch."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        first, last = self.steps
        if last > module.plan.total_steps:
            raise ConfigError(
                f"profile.steps is {steps_label(first, last)!r}, but the run's last step is {module.plan.total_steps}: "
                "give steps up to that one, or raise model.num_steps."
            )
        if last <= module.rollout_step:
            begins = f"the run resumes with step {module.rollout_step + 1}"
            self._say(trainer, f"profile.steps {steps_label(first, last)}: {begins}, so no step is profiled")
        elif trainer.is_global_zero or self.ranks == "all":
            self._first, self._last = max(first, module.rollout_step + 1), last

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        module: Any = pl_module
        if module.rollout_step + 1 == self._first:
            self._start(trainer.strategy.root_device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module: Any = pl_module
        if self._running is not None and (trainer.should_stop or module.rollout_step == self._last):
            has_step = module.rollout_step >= self._first  # false if Ctrl-C ended the run in the first of the steps
            if has_step and self._memory is not None:  # before it is stopped, which drops it
                self._report_memory(trainer, module, self._memory)
            self._stop()
            if has_step and self.tool != "memory":
                self._report(trainer, module)
            self._profile = self._memory = None  # a trace takes much memory

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        module: Any = pl_module
        if self._memory is not None and out_of_memory(exception):
            path = self._path(trainer, module, steps_label(self._first, module.step), "out-of-memory.pickle")
            with suppress(OSError, RuntimeError):  # the error is what to report
                levels = self._memory.write(path)
                exception.add_note(f"GiB allocated up to the error: {peaks(levels)}. For {VIEWER}: {path}")
        self._stop()

    def _start(self, device: torch.device) -> None:
        self._running = ExitStack()
        if self.tool == "nsys":
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            self._running.callback(torch.cuda.profiler.stop)
            self._running.enter_context(ranges_made_by(torch.cuda.nvtx.range))
            return
        if self.tool == "memory":
            self._memory = MemoryHistory(device)
            self._running.callback(self._memory.stop)
            self._running.enter_context(ranges_made_by(self._memory.phase_range))
            return
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profile = self._running.enter_context(profile(activities=activities))
        self._running.enter_context(ranges_made_by(record_function))

    def _stop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    def _report(self, trainer: Trainer, module: Any) -> None:
        """Write the trace, and on rank 0 its summary, and print their paths."""
        steps = steps_label(self._first, module.rollout_step)
        if self._profile is None:
            self._say(trainer, f"profile: steps {steps} were marked for Nsight Systems, which writes its own report")
            return
        path = self._path(trainer, module, steps, "trace.json")
        path.parent.mkdir(exist_ok=True)
        self._profile.export_chrome_trace(str(path))
        if trainer.is_global_zero:
            for line in module.observers.profiled(ProfiledSteps(path, steps, trainer.strategy.root_device)):
                say(line)
        compressed = compress(path)
        self._say(trainer, f"trace of steps {steps}, for https://ui.perfetto.dev: {compressed}")

    def _report_memory(self, trainer: Trainer, module: Any, memory: MemoryHistory) -> None:
        """Write the allocator's history, and print where it is and what each phase had allocated at its peak."""
        steps = steps_label(self._first, module.rollout_step)
        path = self._path(trainer, module, steps, "memory.pickle")
        self._say(trainer, f"memory of steps {steps}, GiB allocated at the most: {peaks(memory.write(path))}")
        self._say(trainer, f"each allocation, for {VIEWER}: {path}; over time: {path.with_suffix('.csv')}")

    def _path(self, trainer: Trainer, module: Any, steps: str, ending: str) -> Path:
        folder: Path = module.run_dir / FOLDER
        return folder / f"steps-{steps}.rank-{trainer.global_rank}.{ending}"

    def _say(self, trainer: Trainer, message: str) -> None:
        if trainer.is_global_zero:
            say(message)


def parse_steps(text: str) -> tuple[int, int]:
    """Return the first and the last step of ``5`` or ``5-7``.

    Raises:
        ConfigError: The text is neither, or the range is empty.
    """
    found = _STEPS.fullmatch(text.strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if last < first:
        raise ConfigError(
            f"profile.steps is {text!r}: give one RL step or the first and last of several, counted from 1, such as "
            "5 or 5-7."
        )
    return first, last


def steps_label(first: int, last: int) -> str:
    """Return the text from which :func:`parse_steps` reads these steps."""
    return str(first) if first == last else f"{first}-{last}"


def compress(path: Path) -> Path:
    """Replace a file by its gzip with the suffix ``.gz``, and return the new path."""
    compressed = path.with_name(f"{path.name}.gz")
    with replaced(compressed) as partial, path.open("rb") as whole, gzip.open(partial, "wb", compresslevel=5) as file:
        shutil.copyfileobj(whole, file, 1 << 20)
    path.unlink()
    return compressed
