"""What one rank does to measure a trainer: it joins the others, and runs the probes on each model."""

from __future__ import annotations

import traceback
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.accelerators import CPUAccelerator

from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.errors import ConfigError
from rlplug.types import MeshSizes
from rlplug_devkit.trainers.cases import Job
from rlplug_devkit.trainers.measured import PROBE_NAMES, PROBES
from rlplug_devkit.trainers.measured import Measured as Measured

TIMEOUT_S: Final = 60.0


def run_cases(job: Job) -> None:
    """Run every probe on every case; rank 0 writes the outcomes to ``results.pt`` in the case's folder. Collective.

    An outcome is ``{"value": ...}``, ``{"refused": message}`` where the trainer raised a ConfigError, or ``{"error":
    traceback}``. Errors of any rank count.
    """
    control: dist.ProcessGroup | None = None
    for case in job.cases:
        strategy = make_strategy(case.mesh)
        if dist.get_world_size() > 1 and control is None:
            # a rank that failed waits here until the collectives of the others have timed out
            control = dist.new_group(backend="gloo", timeout=timedelta(seconds=10 * TIMEOUT_S))
        case.out.mkdir(parents=True, exist_ok=True)
        outcomes = probe(Measured(job.trainer, case, strategy), control)
        if strategy.global_rank == 0:
            torch.save(outcomes, case.out / "results.pt")
    dist.barrier(group=control)
    dist.destroy_process_group()


def probe(measured: Measured, control: dist.ProcessGroup | None) -> dict[str, dict[str, Any]]:
    """Return the outcome of each probe, by its name; without a network, that of building it."""
    outcomes: dict[str, dict[str, Any]] = {}
    for function in PROBES:
        outcome: dict[str, Any]
        try:
            with measured.guard.around(function.__name__):
                outcome = {"value": function(measured)}
        except ConfigError as refusal:
            outcome = {"refused": str(refusal)}
        except Exception:  # noqa: BLE001 - the check of this probe fails with it
            outcome = {"error": traceback.format_exc()}
        problems: list[dict[str, Any] | None] = [None] * dist.get_world_size()
        mine = None if "value" in outcome else outcome
        dist.all_gather_object(problems, mine, group=control)
        outcomes[function.__name__] = next((problem for problem in problems if problem), outcome)
        if measured.policy is None and function is Measured.build:
            problem = outcomes["build"]
            return outcomes | {name: problem for name in PROBE_NAMES if name not in outcomes}
    return outcomes


def make_strategy(mesh: MeshSizes) -> RLFSDP2Strategy:
    """Return a strategy with its processes joined, as Lightning's Trainer sets it up."""
    strategy = RLFSDP2Strategy(
        replicate=mesh.replicate,
        sequence=mesh.sequence,
        tensor=mesh.tensor,
        timeout_s=TIMEOUT_S,
        process_group_backend="gloo",
    )
    is_rank = TorchElasticEnvironment.detect()
    strategy.accelerator = CPUAccelerator()
    strategy.cluster_environment = TorchElasticEnvironment() if is_rank else LightningEnvironment()
    strategy.parallel_devices = [torch.device("cpu")] * mesh.world_size
    strategy._lightning_module = cast(Any, SimpleNamespace())
    strategy.setup_environment()
    return strategy
