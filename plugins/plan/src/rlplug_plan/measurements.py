"""What is known of a memory that has run out: from torch's message, its allocator, and the run's tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import torch

from rlplug.interfaces.memory import PLAN_PHASES, PlanPhase
from rlplug.observability.phase_progress import PHASE_PROGRESS
from rlplug.types import GIB
from rlplug_plan.plan import ADAPTED, CRITIC, REFERENCE, STATE, WEIGHTS
from rlplug_plan.shortage import Shortage
from rlplug_plan.table import PlannedMemory
from rlplug_plan.tensor_bytes import storage_sizes

UNITS: Final = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}
_SIZE: Final = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_TEXTS: Final = {
    "requested": re.compile(rf"Tried to allocate {_SIZE}"),
    "total": re.compile(rf"total capacity of {_SIZE}"),
    "free": re.compile(rf"of which {_SIZE} is free"),
    "allocated": re.compile(rf"{_SIZE} is allocated by PyTorch"),
    "unallocated": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}
"""Numbers in the message of torch's allocator, which are those of the moment; later, tensors have been freed."""
PHASE_OF: Final[dict[str, PlanPhase]] = {**{phase: phase for phase in PLAN_PHASES}, "validate": "rollout"}
"""Phases of a step, and those of the plan that hold what they hold."""


def shortage_of(module: Any, trainer: Any, cause: BaseException) -> Shortage:
    """Return what is known of an error in a run, of which any part may not exist yet.

    Args:
        module: The run's ``RLModule``.
        trainer: Lightning's trainer.
        cause: Error of a library, by which the memory ran out.
    """
    timer, device = module.timer, module.timer.device
    name, found, peak, items = str(device), numbers_of(str(cause)), None, dict[str, int]()
    if device.type == "cuda":
        asleep = timer.asleep_bytes
        if "allocated" in found:
            found["allocated"] -= asleep
        with suppress(RuntimeError):  # of a GPU that is lost as well
            name = f"{device} ({torch.cuda.get_device_name(device)})"
            found = allocator_numbers(device, asleep) | found
            gib = timer.pop_metrics().get(f"memory/{timer.running}")
            peak = torch.cuda.max_memory_allocated(device) - asleep if gib is None else int(gib * GIB)
            items = resident_items(module, trainer.optimizers, device)
    planned = getattr(getattr(getattr(module, "parts", None), "plan", None), "memory", None)
    return Shortage(
        step=module.step,
        rank=trainer.global_rank,
        num_ranks=trainer.world_size,
        during=_during(module),
        phase=PHASE_OF.get(timer.running),
        device=name,
        can_expand=not module.config.engine.capabilities.sleep and not _is_expandable(),
        peak=peak,
        items=items,
        plan=planned.plan if isinstance(planned, PlannedMemory) else None,
        **{key: found.get(key) for key in _TEXTS},
    )


def _during(module: Any) -> str:
    """Return what the run does: a phase, a part of its start, or neither."""
    if module.timer.running:
        return f"phase {module.timer.running}"
    return f"start, {PHASE_PROGRESS.state.name}" if module.start_timer.is_running else "between two phases"


def numbers_of(text: str) -> dict[str, int]:
    """Return the bytes that a message of torch's allocator names; nothing of other messages."""
    found = {name: pattern.search(text) for name, pattern in _TEXTS.items()}
    return {name: int(float(each[1]) * UNITS[each[2]]) for name, each in found.items() if each is not None}


def allocator_numbers(device: torch.device, asleep: int) -> dict[str, int]:
    """Return a GPU's bytes as they are now.

    Args:
        device: The GPU.
        asleep: Bytes that an engine has released and torch still counts.
    """
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return {"total": total, "free": free, "allocated": allocated - asleep, "unallocated": reserved - allocated}


def resident_items(module: Any, optimizers: Iterable[Any], device: torch.device) -> dict[str, int]:
    """Return the bytes on ``device`` of what stays between passes, by its name in the plan."""
    models = getattr(module, "models", None)
    if models is None:
        return {}
    weights = WEIGHTS if module.config.lora is None else ADAPTED
    reference = None if module.config.reference_is_policy else models.reference
    networks = {weights: models.policy, CRITIC: models.critic, REFERENCE: reference}
    trees: dict[str, Any] = {name: list(each.parameters()) for name, each in networks.items() if each is not None}
    trees[STATE] = [list(optimizer.state.values()) for optimizer in optimizers]
    return {name: sum(storage_sizes(tree, device)) for name, tree in trees.items()}


def _is_expandable() -> bool:
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "expandable_segments:true" in settings.lower().replace(" ", "")
