"""The entry point: the memory plan of a run on GPUs, and what is said when memory runs out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplug.plugin_manager import hookimpl

if TYPE_CHECKING:
    from rlplug.config import RunConfig
    from rlplug.distributed.strategy import RLFSDP2Strategy
    from rlplug.interfaces import PolicySpec, RunObserver
    from rlplug.interfaces.memory_plan import GPU, MemoryDecisions
    from rlplug.training.batch_plan import BatchPlan
    from rlplug.types import MeshSizes

RLPLUG_API_VERSION = ">=3.1,<4"


@hookimpl
def rlplug_plan_memory(
    config: RunConfig,
    spec: PolicySpec,
    batch: BatchPlan,
    strategy: RLFSDP2Strategy,
    mesh: MeshSizes,
    longest: int,
    gpu: GPU,
) -> MemoryDecisions:
    from rlplug_plan.run_inputs import PlannedRun
    from rlplug_plan.table import told

    return told(PlannedRun(config, spec, batch, strategy, mesh, longest).decide(gpu))


@hookimpl
def rlplug_make_observer() -> RunObserver:
    from rlplug_plan.memory_errors import MemoryErrors

    return MemoryErrors()
