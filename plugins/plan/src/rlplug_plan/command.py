"""``rlplug plan``: the batch plan and the memory plan of a configuration, without a GPU, a weight or a run folder."""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlplug.cli.command_parser import CommandParser
from rlplug.cli.find_commands import uncollected_imports
from rlplug.errors import ConfigError

if TYPE_CHECKING:
    from rlplug.cli.lightning_cli import RLCLI
    from rlplug.interfaces.memory_plan import GPU
    from rlplug_plan.decisions import Decisions
    from rlplug_plan.stand_ins import StandIn

DESCRIPTION: Final = """what will live on each GPU in each phase of a step, and whether it fits; nothing is loaded

  -c, --config CONFIG    and all other options of rlplug fit: see rlplug fit --help=all

Exit status 1: it does not fit, and the smallest change that makes it fit is printed.
"""
TAKES_CONFIGURATION: Final = True
GPU_GIB: Final = "how much memory each GPU has, in GiB, such as --gpu-gib 80"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of what is not a key of the configuration."""
    parser = CommandParser("plan", "[options] [--model-size SIZE | --model PATH] [-c CONFIG ...]", DESCRIPTION)
    add = parser.add_argument
    add("--gpu-gib", metavar="GIB", help="memory of each GPU; by default that of this machine's first")
    add(
        "--network-gbit-s",
        metavar="GBIT",
        help="speed of each host's network, to estimate the seconds of a weight sync between hosts",
    )
    add("--write", metavar="FILE", help="write what is recommended as YAML, to lay over the run with a further -c")
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model-size",
        metavar="SIZE",
        help="plan before there is a model or data: the shape of a published dense model of about 7B, 0.6B, 500M ...",
    )
    model.add_argument("--model", metavar="PATH", help="the same, with the shape in a config.json, or in its folder")
    add("--prompt-tokens", metavar="N", help="length of its prompts; 1024 by default")
    return parser


def plan_command(arguments: list[str]) -> int:
    """Show what will live on each GPU, without one, and whether it fits: -c CONFIG --gpu-gib 80.

    Raises:
        ConfigError: The configuration is wrong, or there is neither ``--gpu-gib`` nor a GPU.
    """
    given, arguments = make_parser().parse_known_args(arguments)
    network = given.network_gbit_s
    gbit_s = None if network is None else _number("--network-gbit-s", network, "how fast it is, such as 400")
    gib = None if given.gpu_gib is None else _number("--gpu-gib", given.gpu_gib, GPU_GIB)
    target = None if given.write is None else Path(given.write)
    has_stand_in = given.model_size is not None or given.model is not None
    if given.prompt_tokens is not None and not has_stand_in:
        raise ConfigError("--prompt-tokens is for a run without data: give --model-size or --model too.")
    with uncollected_imports():  # torch and Lightning take seconds
        from rlplug_plan.overlay import check_path
        from rlplug_plan.stand_ins import PROMPT_TOKENS, make_stand_in

        gpu, assumed = _gpu(gib, may_assume=has_stand_in)
    if target is not None:
        check_path(target)
    if not has_stand_in:
        return _plan(arguments, gpu, gbit_s, target, None)
    tokens = int(_number("--prompt-tokens", given.prompt_tokens or str(PROMPT_TOKENS), "how many, such as 1024"))
    with tempfile.TemporaryDirectory() as folder:
        stand_in = make_stand_in(Path(folder), given.model_size, given.model, tokens, arguments, assumed)
        try:
            return _plan(stand_in.arguments, gpu, gbit_s, target, stand_in)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{folder}/model", given.model or given.model_size)) from error


def _plan(arguments: list[str], gpu: GPU, gbit_s: float | None, target: Path | None, stand_in: StandIn | None) -> int:
    """Plan the run of ``rlplug fit``'s arguments and say it; return the exit status."""
    with uncollected_imports():
        from rlplug.cli.lightning_cli import ConfiguredCLI, read_command
        from rlplug.distributed.strategy import RLFSDP2Strategy
        from rlplug.observability.terminal import say
        from rlplug.recording.run_output import print_batch_plan, print_memory_plan
        from rlplug.setup.planning import plan_run
        from rlplug.weight_sync.manifest import policy_weights
        from rlplug_plan.run_inputs import PlannedRun
        from rlplug_plan.shared_tokens import sharing_note
        from rlplug_plan.sync_time import SyncTime

    cli = read_command(ConfiguredCLI, ["fit", *arguments])
    options, module, data = cli.trainer_options, cli.model, cli.datamodule
    strategy = options.strategy
    if not isinstance(strategy, RLFSDP2Strategy):
        raise ConfigError(
            "trainer.strategy: rlplug plan needs rlplug.distributed.strategy.RLFSDP2Strategy, as fit does."
        )
    data.load("fit", module.prompt_rules)
    world_size = options.num_nodes * num_devices(options.devices)
    plan = plan_run(module.config, module.inputs, data, strategy, world_size, gpu)
    config, updates = module.config, (plan.batch.num_epochs, plan.batch.num_mini_batches)
    module.source.check(config.engine, config.algorithm, config.sampling.max_new_tokens, updates)
    memory = plan.memory
    if memory is None:
        raise ConfigError("the plugin plan is blocked, and nothing else plans the memory: leave out --block plan.")

    rows = plan.batch.table_rows(module.config.on_policy_pass)
    print_batch_plan(rows, f"batch plan, GPUs: {plan.mesh.world_size}")
    print_memory_plan(memory)
    if plan.batch.layout is not None:
        completion = config.sampling.max_new_tokens
        say(sharing_note(plan.batch, plan.longest - completion, completion))
    for effect in memory.left_out:
        say(effect.description)
    if gbit_s is not None:
        num_shards = max(1, options.num_nodes // plan.mesh.replicate)
        say(SyncTime.of(policy_weights(module.inputs.spec).values(), num_shards, gbit_s).describe(gbit_s))
    for note in stand_in.notes if stand_in is not None else ():
        say(note)
    if memory.shortfall is not None:
        say(str(memory.shortfall))
    if target is not None:
        run = PlannedRun(config, module.inputs.spec, plan.batch, strategy, plan.mesh, plan.longest)
        say(f"wrote {target}: {', '.join(_write(target, run.decide(gpu), cli, stand_in))}")
    return 0 if memory.shortfall is None else 1


def _write(target: Path, decisions: Decisions, cli: RLCLI, stand_in: StandIn | None) -> list[str]:
    """Write what is recommended over the run, or the whole run where it has stand-ins; return the keys that changed."""
    import yaml

    from rlplug_plan.overlay import write_overlay, write_run

    configured = cli.config["fit"]
    if stand_in is None:
        return write_overlay(target, decisions, configured.as_dict())
    text = cli._parser("fit").dump(configured, skip_default=True, skip_validation=True)
    return write_run(target, decisions, configured.as_dict(), yaml.safe_load(text), stand_in)


def num_devices(devices: Any) -> int:
    """Return the GPUs of a node that ``trainer.devices`` asks for; ``auto`` and -1 take all of this machine."""
    text = ",".join(map(str, devices)) if isinstance(devices, (list, tuple)) else str(devices)
    if text in ("auto", "-1"):
        import torch

        return max(1, torch.cuda.device_count())
    return len([part for part in text.split(",") if part]) if "," in text or isinstance(devices, list) else int(text)


def _gpu(gib: float | None, may_assume: bool) -> tuple[GPU, str]:
    """Return the GPU to plan for, and what was assumed of it, which is empty where it is known."""
    import torch

    from rlplug.interfaces.memory_plan import GPU, total_and_free
    from rlplug.types import GIB
    from rlplug_plan.stand_ins import GPU_GIB as ASSUMED_GIB

    if gib is None and torch.cuda.is_available():
        return GPU(*total_and_free(torch.device("cuda", 0))), ""
    size = ASSUMED_GIB if gib is None and may_assume else gib
    if size is not None:
        return GPU(int(size * GIB), int(size * GIB), is_here=False), f"--gpu-gib {size:g}" * (gib is None)
    raise ConfigError(f"there is no GPU here: say {GPU_GIB}.")


def _number(option: str, text: str, what: str) -> float:
    """Return a positive number that an option was given."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise ConfigError(f"{option} is {text!r}: say {what}.")
    return number
