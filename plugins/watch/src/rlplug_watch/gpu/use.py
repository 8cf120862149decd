"""``GPUUse``: the metrics ``gpu/...`` of a step's ranks, and ``throughput/mfu``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from statistics import fmean
from typing import Any, Final

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info

from rlplug.errors import ConfigError
from rlplug.interfaces import RunObserver
from rlplug.models.loading import empty_model
from rlplug.types import Rollout
from rlplug_watch.gpu.mfu import TokenCounts, UpdateCost, peak_flops
from rlplug_watch.gpu.nvml import MEASURES, GPUSampler, Samples

NVML: Final = "pynvml"
INSTALL: Final = "pip install 'rlplug-watch[gpu]'"
REDUCE: Final[Mapping[str, Callable[[list[float]], float]]] = {"busy_share": fmean, "memory_gib": max, "power_w": fmean}
"""How a rank's samples of a step become one number: the memory's is its peak."""


class GPUUse(RunObserver, Callback):
    """Samples each rank's GPU while a training runs on GPUs, and adds up what the update computes.

    Every rank takes part in one exchange a step. A measure that some rank lacks is absent from the step, never 0; what
    cannot be measured at all is said once.
    """

    def __init__(self) -> None:
        self._strategy: Any = None
        self._sampler: GPUSampler | None = None
        self._counts = TokenCounts()
        self._cost: UpdateCost | None = None
        self._num_epochs = 1
        self._peak = 0.0
        """Of this rank's GPU, in FLOP/s; 0 where it is not known."""
        self._has_said = False

    # ---- begin and end --------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        device = pl_module.strategy.root_device
        if device.type != "cuda":
            return
        self._strategy = pl_module.strategy
        self._sampler = self._started(device)
        self._prepare_mfu(pl_module.config, torch.cuda.get_device_name(device))

    def _started(self, device: torch.device) -> GPUSampler | None:
        try:
            nvml = import_module(NVML)
        except ModuleNotFoundError:
            rank_zero_info(f"gpu/... is not measured: {INSTALL}.")
            return None
        try:
            sampler = GPUSampler(nvml, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        except nvml.NVMLError as error:
            self._say(f"gpu/... is not measured: NVML says {error} ({type(error).__name__}).")
            return None
        if sampler.unsupported:
            self._say(f"{', '.join(f'gpu/{name}' for name in sampler.unsupported)}: NVML has none for this GPU.")
        return sampler

    def _prepare_mfu(self, config: Any, gpu: str) -> None:
        self._peak = peak_flops(gpu) or 0.0
        reasons = {
            f"the peak of {gpu} is not known": not self._peak,
            f"the policy computes in {config.policy.dtype}": config.policy.dtype != "bfloat16",
            "a critic trains too": config.critic is not None,
        }
        if found := [reason for reason, holds in reasons.items() if holds]:
            rank_zero_info(f"throughput/mfu is not given: {found[0]}.")
            return
        try:
            model = empty_model(config.policy)
        except ConfigError as error:  # another trainer's model: its run goes on
            rank_zero_info(f"throughput/mfu is not given: {error}")
            return
        self._cost = UpdateCost.of(model, is_frozen=config.lora is not None)
        self._num_epochs = config.batch.num_epochs

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._sampler is not None:
            self._sampler.drain()  # what lies between steps, such as a checkpoint
        self._counts = TokenCounts()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self.close()

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.close()

    def close(self) -> None:
        """End the sampling."""
        if self._sampler is not None:
            self._sampler.close()

    # ---- a step ---------------------------------------------------------------------------------------------------

    def after_rollout(self, rollout: Rollout) -> None:
        """Count the tokens that the update of the step computes."""
        if self._cost is not None:
            self._counts = TokenCounts.of(rollout.samples)

    def after_update(self, metrics: Mapping[str, float]) -> dict[str, float] | None:
        """Return the step's metrics of all ranks. Collective, on GPUs."""
        if self._strategy is None:
            return None
        used = reduced(self._sampler.drain() if self._sampler is not None else {})
        if self._sampler is not None and self._sampler.problem and not self._has_said:
            self._say(f"gpu/... is not measured any more: NVML says {self._sampler.problem}.")
            self._has_said = True
        row = [*used, metrics.get("time/update", 0.0), self._peak, *self._counts.as_row()]
        rows = self._strategy.gather_arrays(np.array([row]))
        found = of_ranks(rows[:, : len(MEASURES)])
        return found | self._mfu(rows[:, len(MEASURES) :], metrics.get("batch/shared_tokens", 0.0))

    def _mfu(self, rows: Any, shared: float) -> dict[str, float]:
        """Return the MFU from seconds, peaks and counts of all ranks, float [ranks, 7]; none of a step without work."""
        seconds, peaks, counts = rows[:, 0].max(), rows[:, 1], TokenCounts(*rows[:, 2:].sum(axis=0))
        if self._cost is None or not peaks.all() or not counts.tokens or not seconds:
            return {}
        flops = self._num_epochs * self._cost.flops(counts.without_shared(shared))
        return {"throughput/mfu": float(flops / (seconds * peaks.sum()))}

    def _say(self, text: str) -> None:
        rank = 0 if self._strategy is None else self._strategy.global_rank
        warnings.warn(f"rank {rank}: {text}", stacklevel=3)


def reduced(samples: Samples) -> list[float]:
    """Return one number for each of ``MEASURES``, NaN where there are no samples."""
    return [REDUCE[name](values) if (values := samples.get(name)) else float("nan") for name in MEASURES]


def of_ranks(rows: Any) -> dict[str, float]:
    """Return the metrics of all ranks' measures, float [ranks, measures]; those that some rank lacks are left out."""
    busy, memory, power = rows.T
    found = {
        "gpu/busy_share": busy.mean(),
        "gpu/busy_share_min": busy.min(),
        "gpu/memory_gib": memory.max(),
        "gpu/power_w": power.mean(),
    }
    return {name: float(value) for name, value in found.items() if not np.isnan(value)}
