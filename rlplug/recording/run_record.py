"""``run.json``: what a run was, what it ran on, and how it ended."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from email.parser import HeaderParser
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch import Trainer

from rlplug.distributed.durable_files import write_file
from rlplug.plugin_manager import describe, plugins
from rlplug.types import GIB

METRICS: Final = "metrics.jsonl"
SAMPLES: Final = "samples.jsonl"
REWARD_ERRORS: Final = "reward_errors.jsonl"
RECORD: Final = "run.json"


class RunRecord:
    """Contents of a run's ``run.json``, on the first rank alone.

    Args:
        path: The file.
        command: Lightning's stage, ``fit`` or ``validate``.
        trainer: The run's.
        compile_cache: Where compiled code is kept, as a line; ``None`` where the run does not say.
    """

    def __init__(self, path: Path, command: str, trainer: Trainer, compile_cache: str | None) -> None:
        self._path = path
        self.values: dict[str, Any] = {
            "status": "unfinished",  # of a run that is killed it stays so; whether one goes on, run.lock tells
            "command": command,
            "started": _now(),
            "finished": None,
            "versions": {"python": platform.python_version(), **installed_versions()},
            "plugins": describe(plugins().records),
            "device": str(trainer.strategy.root_device),
            "gpu_gib": _gpu_gib(trainer.strategy.root_device),
            "world_size": trainer.world_size,
            "batch_plan": [],
            "memory_plan": [],
            "memory_notes": [],
            "prompts": trainer.datamodule.counts,  # type: ignore[attr-defined]
            "effects": [],
            "start": {},
            "compile_cache": compile_cache,
            "changes": [],
            "hook_costs": [],
            "message": None,
        }

    def add_plan(self, module: Any) -> None:
        """Add the plan of a training, and what optimizations did to its models."""
        self.values["batch_plan"] = module.plan.batch.table_rows(module.config.on_policy_pass)
        memory = module.plan.memory
        if memory is not None:
            self.values["memory_plan"] = memory.rows
            self.values["memory_notes"] = memory.notes
        self.values["effects"] = [effect.description for effect in module.models.effects]

    def finish(self, status: str, message: str | None) -> None:
        """Say how the run ended, and write the file."""
        costs = plugins().costs.rows()
        self.values |= {"status": status, "message": message, "finished": _now(), "hook_costs": costs}
        self.write()

    def write(self) -> None:
        """Replace the file."""
        write_file(self._path, json.dumps(self.values, indent=2))


def installed_versions() -> dict[str, str]:
    """Return the version of each distribution that is installed, by its name.

    Only the heads of their metadata are parsed: with the long descriptions it would take a third of a second.
    """
    versions = {}
    for distribution in distributions():
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        head = HeaderParser().parsestr(text.partition("\n\n")[0])
        versions[head["Name"]] = head["Version"]
    return versions


def _gpu_gib(device: torch.device) -> float | None:
    """Return the memory of a GPU."""
    return float(torch.cuda.get_device_properties(device).total_memory / GIB) if device.type == "cuda" else None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
