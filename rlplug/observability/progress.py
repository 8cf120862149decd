"""The progress bar of ``fit``: steps, the phase that runs, and what users watch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class RLProgressBar(ProgressBar):
    """One line a run: ``12/160 update | reward 0.41 | length 4.0 | 5.2k tokens/s | rollout 61% update 33%``.

    Where stderr is not a terminal, a line is printed every tenth of the run instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Any = None

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        if self._enabled and sys.stderr.isatty():
            self._bar = tqdm(
                total=module.plan.total_steps, initial=module.rollout_step, unit="step", dynamic_ncols=True
            )
            module.timer.on_enter = self._bar.set_description

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module: Any = pl_module
        if not self._enabled:
            return
        status = status_line(module.newest_metrics)
        if self._bar is not None:
            self._bar.set_postfix_str(status, refresh=False)
            self._bar.update(module.rollout_step - self._bar.n)
        elif module.rollout_step % max(1, module.plan.total_steps // 10) == 0:
            print(f"step {module.rollout_step}/{module.plan.total_steps} | {status}", file=sys.stderr, flush=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._bar is not None:
            self._bar.close()


def status_line(metrics: dict[str, float]) -> str:
    """Return the newest step's metrics in a few words; phases below a tenth of the step are left out."""
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
