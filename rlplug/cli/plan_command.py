"""``rlplug plan``: the batch plan and the memory plan of a configuration, without a GPU, a weight or a run folder."""

from __future__ import annotations

from typing import Any

import torch

from rlplug.cli.lightning_cli import ConfiguredCLI, read_command
from rlplug.cli.run_output import print_batch_plan, print_memory_plan
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.errors import ConfigError
from rlplug.observability.terminal import say
from rlplug.setup import plan_run
from rlplug.training.memory_plan.decisions import shortfall
from rlplug.training.memory_plan.inputs import GPU, total_and_free
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
            "trainer.strategy: rlplug plan needs rlplug.distributed.strategy.RLFSDP2Strategy, as fit does."
        )
    data.load("fit", module.prompt_rules)
    world_size = options.num_nodes * num_devices(options.devices)
    plan = plan_run(module.config, module.inputs, data, strategy, world_size, gpu)
    memory = plan.memory
    assert memory is not None  # there is a GPU, here or elsewhere

    rows = plan.batch.table_rows(module.config.on_policy_pass)
    print_batch_plan(rows, f"batch plan, GPUs: {plan.mesh.world_size}")
    print_memory_plan(memory)
    for effect in memory.left_out:
        say(effect.description)
    problem = shortfall(memory.plan)
    if problem is not None:
        say(str(problem))
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
