"""``rlplug plan``: the batch plan and the memory plan of a configuration, without a GPU, a weight or a run folder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console

from rlplug.cli.lightning_cli import ConfiguredCLI, read_command
from rlplug.cli.run_folder import batch_table
from rlplug.config_checks import check_optimizations
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.errors import ConfigError
from rlplug.memory_inputs import PlannedRun
from rlplug.training.memory_plan.decisions import shortfall
from rlplug.training.memory_plan.inputs import GPU, total_and_free
from rlplug.training.memory_plan.table import memory_notes, memory_table
from rlplug.types import GIB


def plan_command(arguments: list[str], gpu_gib: str | None) -> bool:
    """Print the plans of a run; return whether it fits.

    Args:
        arguments: Those of ``rlplug fit``, without the command.
        gpu_gib: Memory of each GPU; by default that of this machine's first.

    Raises:
        ConfigError: The configuration is wrong, or there is neither ``gpu_gib`` nor a GPU.
    """
    cli = read_command(ConfiguredCLI, ["fit", *arguments])
    gpu = _gpu(gpu_gib)
    options, module, data = cli.trainer_options, cli.model, cli.datamodule
    strategy = options.strategy
    if not isinstance(strategy, RLFSDP2Strategy):
        raise ConfigError(
            "trainer.strategy: rlplug plan needs rlplug.distributed.strategy.RLFSDP2Strategy, as rlplug fit does."
        )
    mesh = strategy.mesh_sizes(options.num_nodes * num_devices(options.devices))
    data.trainer = SimpleNamespace(lightning_module=module)
    data.setup("fit")
    longest = data.train_stream.longest_prompt + module.sampling.max_new_tokens
    check_optimizations(module.optimizations)
    module.engine.check(module.spec)
    module.plan = module.make_batch_plan(mesh, longest)
    decisions = PlannedRun(module, strategy, mesh, longest).decide(gpu)

    console = Console()
    console.print(batch_table(module.plan.rows(module.on_policy_pass), f"batch plan, GPUs: {mesh.world_size}"))
    console.print(memory_table(decisions.plan))
    for line in [*memory_notes(decisions), *(effect.description for effect in decisions.left_out)]:
        console.print(line, highlight=False, soft_wrap=True)
    problem = shortfall(decisions.plan)
    if problem is not None:
        console.print(str(problem), highlight=False, soft_wrap=True)
    return problem is None


def num_devices(devices: Any) -> int:
    """Return the GPUs of a node that ``trainer.devices`` asks for; ``auto`` and -1 take all of this machine."""
    text = ",".join(map(str, devices)) if isinstance(devices, (list, tuple)) else str(devices)
    if text in ("auto", "-1"):
        return max(1, torch.cuda.device_count())
    return len([part for part in text.split(",") if part]) if "," in text or isinstance(devices, list) else int(text)


def _gpu(gib: str | None) -> GPU:
    if gib is None and torch.cuda.is_available():
        return GPU(*total_and_free(torch.device("cuda", 0)))
    try:
        total = int(float(gib or "") * GIB)
    except ValueError:
        total = 0
    if total <= 0:
        given = "there is no GPU here" if gib is None else f"--gpu-gib is {gib!r}"
        raise ConfigError(f"{given}: say how much memory each GPU has, in GiB, such as --gpu-gib 80.")
    return GPU(total, total, is_here=False)
