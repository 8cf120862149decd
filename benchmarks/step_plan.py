"""What the step benchmark's adapters save: rlplug's memory plan of the same step with them, and without, on GPUs."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import yaml
from step_rlplug import configuration
from step_work import Workload, prepare, write_prompts

IF_NEEDED = {"class_path": "GradientCheckpointing", "init_args": {"only_if_needed": True}}
PHASES = ("sync", "rollout", "logprobs", "update")
"""Columns of the plan's table."""
NUM_GPUS = (1, 2, 4, 8)


def plans(workload: Workload, folder: Path, gpu_gib: float) -> str:
    """Return a table: ``workload`` on one GPU of ``gpu_gib``, and all its weights trained on as many as that needs.

    Engines may sleep, and blocks recompute where the plan needs it. No GPU is needed here.
    """
    lines = [f"| trained | GPUs | planned, GiB a GPU | fits {gpu_gib:g} GiB |", "|-|-|-|-|"]
    whole = dataclasses.replace(workload, lora_rank=0)
    for chosen, name in ((workload, f"adapters of rank {workload.lora_rank}"), (whole, "all weights")):
        for num_gpus in NUM_GPUS:
            fits, needed = planned(chosen, folder, num_gpus, gpu_gib)
            phase, most = max(needed.items(), key=lambda item: item[1])
            lines.append(f"| {name} | {num_gpus} | {most:.1f}, {phase} | {'yes' if fits else 'no'} |")
            if fits:
                break
    return "\n".join(lines)


def planned(workload: Workload, folder: Path, num_gpus: int, gpu_gib: float) -> tuple[bool, dict[str, float]]:
    """Return whether ``rlplug plan`` says that the step fits, and the GiB that each phase needs of a GPU.

    Raises:
        RuntimeError: There is no plan.
    """
    run = configuration(workload, prepare(workload, folder, False), write_prompts(workload, folder), 1, folder / "runs")
    del run["trainer"]["callbacks"]
    run["trainer"] |= {"accelerator": "gpu", "devices": num_gpus}
    run["model"]["optimizations"].insert(0, IF_NEEDED)
    file = folder / "plan.yaml"
    file.write_text(yaml.safe_dump(run))
    command = [sys.executable, "-m", "rlplug", "plan", "--gpu-gib", str(gpu_gib), "-c", str(file)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    row = re.search(r"^│ needed +│(.+)", done.stdout, re.MULTILINE)
    if row is None:
        raise RuntimeError(f"no memory plan:\n{done.stdout[-2000:]}")
    return done.returncode == 0, dict(zip(PHASES, map(float, re.findall(r"[\d.]+", row.group(1))), strict=True))
