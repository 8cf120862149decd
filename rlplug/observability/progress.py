"""Progress of a run: a live display on a terminal, and lines anywhere else."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table

from rlplug.interfaces.observer import RunObserver, StepRecord
from rlplug.observability.phase_progress import PHASE_PROGRESS
from rlplug.observability.terminal import console, guarded, is_interactive, start_live, stop_live, styled

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

LINE_S: Final = 30.0
"""Longest time without a line, where progress is no live display, in seconds."""
NAME_WIDTH: Final = 10
COUNT_WIDTH: Final = 20
"""Widths of the live display's names and counts, in characters: the longest phase of the core, and 4,096 of 4,096."""
NUM_TIMED: Final = 20
"""Number of last steps whose median duration gives the time left."""


class RunProgress:
    """Where a run is: its step, its phase, its newest metrics and the time that is left.

    Args:
        total_steps: Steps of the run; 0 for a validation.
        step: Steps that were done before it began.
    """

    def __init__(self, total_steps: int, step: int) -> None:
        self.total_steps = total_steps
        self.step = step
        self.status = ""
        self._seconds: deque[float] = deque(maxlen=NUM_TIMED)
        self._step_began = time.monotonic()

    def begin_steps(self, total_steps: int, step: int) -> None:
        """Take the numbers of a run, which are not known when its start begins."""
        self.total_steps, self.step, self._step_began = total_steps, step, time.monotonic()

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        self._seconds.append(now - self._step_began)
        self.step, self.status, self._step_began = step, status_line(metrics), now

    @property
    def left(self) -> str:
        """Time left as text; empty before the first step has ended."""
        if not self._seconds:
            return ""
        seconds = median(self._seconds) * (self.total_steps - self.step) - (time.monotonic() - self._step_began)
        return f"{clock(seconds)} left"

    @property
    def line(self) -> str:
        """Where the run is, as one line."""
        phase = PHASE_PROGRESS.state
        count = "" if phase.total is None else f" {phase.num_done:,}/{phase.total:,} {phase.unit}"
        parts = [f"step {self.step}/{self.total_steps}"] if self.total_steps else []
        parts += [f"{phase.name}{count}, {clock(phase.seconds)}", compiling(), tokens_per_s(), self.left]
        return " | ".join(filter(None, parts))


class RLProgressBar(ProgressBar, RunObserver):
    """Progress of a run: steps, the current phase with what it has done, tokens a second, time left, main metrics.

    It is a live display when stdout and stderr are terminals. Otherwise a line is written to stderr after every tenth
    of the run, and whenever 30 s have passed without one. It begins before the models are built, and says what the
    start waits for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._progress = RunProgress(0, 0)
        self._shown = ExitStack()
        self._lines: ProgressLines | None = None

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._progress = RunProgress(0, 0)
        if self._enabled:  # on the first rank
            module: Any = pl_module
            module.timer.on_enter = PHASE_PROGRESS.begin
            self._lines = self._shown.enter_context(shown(self._progress))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        self._progress.begin_steps(module.plan.total_steps, module.rollout_step)

    def step_ended(self, record: StepRecord) -> None:
        progress = self._progress
        progress.end_step(record.step, record.metrics)
        if self._lines is not None and record.step % max(1, progress.total_steps // 10) == 0:
            self._lines.write(f"step {record.step}/{progress.total_steps} | {progress.status}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._shown.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._shown.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._shown.close()


@contextmanager
def shown(progress: RunProgress) -> Iterator[ProgressLines | None]:
    """Show progress while the body runs: a live display, or lines, which are yielded to write more of them."""
    with ExitStack() as stack:
        stack.enter_context(guarded())
        if is_interactive():
            start_live(Live(get_renderable=lambda: display(progress), console=console(), transient=True))
            stack.callback(stop_live)
            yield None
        else:
            lines = ProgressLines(progress)
            stack.callback(lines.close)
            yield lines


def display(progress: RunProgress) -> RenderableType:
    """Return the live display: a bar of the run, a bar of the phase, and the newest metrics."""
    phase = PHASE_PROGRESS.state
    grid = Table.grid(padding=(0, 1), expand=True)
    for min_width in (NAME_WIDTH, COUNT_WIDTH):  # so that bars stay where they are
        grid.add_column(no_wrap=True, min_width=min_width)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    if progress.total_steps:
        bar = Bar(total=progress.total_steps, completed=progress.step)
        count = f"{progress.step:,}/{progress.total_steps:,}"
        grid.add_row(styled("step"), styled(count), bar, styled(progress.left))
    if phase.total is None:
        bar, count = Bar(total=None, pulse=True, animation_time=phase.seconds), ""
    else:
        bar = Bar(total=phase.total or 1, completed=phase.num_done)
        count = f"{phase.num_done:,}/{phase.total:,} {phase.unit}"
    info = "  ".join(filter(None, [compiling(), tokens_per_s(), clock(phase.seconds)]))
    grid.add_row(styled(phase.name, "bold"), styled(count), bar, styled(info))
    rows = Table.grid(expand=True)
    rows.add_row(grid)
    rows.add_row(styled(progress.status))
    rows.columns[0].no_wrap, rows.columns[0].overflow = True, "ellipsis"
    return rows


def tokens_per_s() -> str:
    """Return the tokens a second of the phase as text; empty when it generates none."""
    phase = PHASE_PROGRESS.state
    return f"{phase.num_tokens / max(phase.seconds, 1e-3):,.0f} tokens/s" if phase.num_tokens else ""


def compiling() -> str:
    """Return since when torch.compile runs, as text; empty while it does not."""
    seconds = PHASE_PROGRESS.state.compiling_s
    return "" if seconds is None else f"compiling, {clock(seconds)}"


def clock(seconds: float) -> str:
    """Return a duration as ``1:02`` or ``10:01:02``."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def status_line(metrics: Mapping[str, float]) -> str:
    """Return the main metrics of a step as one line; phases below a tenth of the step's time are left out."""
    parts = []
    if "reward/mean" in metrics:
        parts.append(f"reward {metrics['reward/mean']:.3f}")
    if "completion/length_mean" in metrics:
        parts.append(f"length {metrics['completion/length_mean']:.1f}")
    if "throughput/tokens_per_s" in metrics:
        parts.append(f"{metrics['throughput/tokens_per_s']:,.0f} tokens/s")
    seconds = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    total = seconds.pop("step", 0.0)
    shares = sorted(((value / total, name) for name, value in seconds.items() if total), reverse=True)
    parts.append(" ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.1))
    return " | ".join(parts)


class ProgressLines:
    """Writes lines to stderr: what it is given, and where the run is when nothing was written for a while."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress
        self._is_closed = threading.Event()
        self._newest = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="rlplug-progress", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        self._newest = time.monotonic()
        print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join(timeout=1)

    def _watch(self) -> None:
        while not self._is_closed.wait(max(0.05, self._newest + LINE_S - time.monotonic())):
            if time.monotonic() - self._newest >= LINE_S:
                self.write(self._progress.line)
