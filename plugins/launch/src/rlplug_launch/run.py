"""One run on one or many hosts, with engine servers beside it."""

from __future__ import annotations

import os
import pydoc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from lightning.pytorch.cli import LightningArgumentParser

from rlplug.cli.configuration.environment_values import resolve_variables
from rlplug.cli.lightning_cli import RLCLI, instantiation_errors, read_command
from rlplug.distributed.checkpoints.files import has_key, run_dir_of
from rlplug.distributed.durable_files import new_numbered_folder, require_no_file, write_file
from rlplug.errors import ConfigError
from rlplug.observability.terminal import make_table, say, show
from rlplug.plugin_manager import plugins
from rlplug_launch.config import LaunchConfig, ServersConfig
from rlplug_launch.driver import Driver
from rlplug_launch.launcher import Launcher, TaskNeeds
from rlplug_launch.local import Local
from rlplug_launch.plan import LaunchPlan, make_plan
from rlplug_launch.state import COLUMNS, FOLDER
from rlplug_launch.tasks import gpus_text

LAUNCH_CONFIG: Final = "launch.yaml"
FIT_CONFIG: Final = "config.yaml"


class LaunchCLI(RLCLI):
    """CLI that reads the options of ``fit`` and ``launch``, and makes the launcher alone: a login node has no GPU."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(LaunchConfig, "launch")

    def instantiate_classes(self) -> None:
        options = self.config[self.subcommand].launch
        chosen = options.launcher
        made: Any = Local if chosen is None else pydoc.locate(chosen.class_path)  # the parser has found it there
        self.launcher_name = made.__name__
        with instantiation_errors():
            self.launcher: Launcher = made(**vars(chosen.init_args) if chosen and "init_args" in chosen else {})
        servers = None if options.servers is None else ServersConfig(**vars(options.servers))
        self.launch = LaunchConfig(self.launcher, servers, options.max_restarts, options.grace_s)

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def launch_run(arguments: list[str], is_dry_run: bool) -> int:
    """Start a run, wait for its end, and return the exit status.

    Args:
        arguments: Keys of the configuration, ``--launcher`` and ``--resume``.
        is_dry_run: Print where all would run, and start nothing.

    Raises:
        ConfigError: The configuration is wrong, or a node lacks something.
    """
    command = [sys.executable, "-m", "rlplug", "launch", *arguments]
    cli = read_command(LaunchCLI, ["fit", *_with_launcher(_with_saved_options(arguments))])
    launcher = cli.launcher
    saved = yaml.safe_load(cli.config_yaml)  # with references to variables, which each node reads for itself
    options = saved.pop("launch")
    checkpoint = cli.config[cli.subcommand].ckpt_path
    if checkpoint is not None and cli.launch.servers is not None and saved["model"]["rollout"]:
        saved["model"]["rollout"]["init_args"]["urls"] = None  # those of the servers that the run had
    resolved = resolve_variables(saved)
    plan = make_plan(resolved, cli.launch, not isinstance(launcher, Local) or torch.cuda.is_available())
    tasks = plan.tasks()
    script = launcher.batch_script(tasks, command, plan.config.grace_s)
    if script is not None:
        say(script)
        say("dry run: nothing was submitted" if is_dry_run else launcher.submit(script))
        return 0
    try:
        _print_placement(launcher, cli.launcher_name, tasks)
        if is_dry_run:
            say("dry run: nothing was started")
            return 0
        folder = _run_folder(resolved, checkpoint)
        _write(folder / FOLDER / FIT_CONFIG, saved)
        _write(folder / FOLDER / LAUNCH_CONFIG, {"launch": options})
        say(f"run folder: {folder}, logs: {folder / FOLDER}")
        return _drive(plan, launcher, cli.launcher_name, folder, checkpoint)
    finally:
        launcher.close()


def _drive(plan: LaunchPlan, launcher: Launcher, name: str, folder: Path, checkpoint: str | None) -> int:
    return Driver(plan, launcher, name, folder, folder / FOLDER / FIT_CONFIG, checkpoint).run()


def _print_placement(launcher: Launcher, name: str, tasks: Sequence[TaskNeeds]) -> None:
    places = launcher.place(tasks)
    rows = [
        (task.name, place.node, gpus_text(task.gpus, place), place.address)
        for task, place in zip(tasks, places, strict=True)
    ]
    show(make_table(COLUMNS[:-1], rows, f"placement by {name}"))


def _run_folder(config: dict[str, Any], checkpoint: str | None) -> Path:
    """Return the folder of the run that goes on, or a new one."""
    folder = run_dir_of(checkpoint) if checkpoint is not None else None
    if folder is None:
        parent = Path(os.path.expanduser(config["run"]["dir"]))
        require_no_file(parent, "run.dir")
        folder = new_numbered_folder(parent)
    (folder / FOLDER).mkdir(exist_ok=True)
    return folder


def _write(file: Path, config: dict[str, Any]) -> None:
    config_yaml = yaml.safe_dump(config, sort_keys=False)
    write_file(file, config_yaml, has_key(config_yaml))


def _with_launcher(arguments: list[str]) -> list[str]:
    """Replace ``--launcher slurm`` by ``--launch.launcher Slurm``.

    Raises:
        ConfigError: No launcher has that name.
    """
    result: list[str] = []
    each = iter(arguments)
    for argument in each:
        option, equals, value = argument.partition("=")
        if option != "--launcher":
            result.append(argument)
            continue
        value = value if equals else next(each, "")
        registry = plugins().registry
        known = {name.lower(): name for name in registry.names("launchers")}
        if value.lower() not in known:
            raise ConfigError(f"--launcher: {registry.explain_unknown('launchers', value.capitalize())}")
        result += ["--launch.launcher", known[value.lower()]]
    return result


def _with_saved_options(arguments: list[str]) -> list[str]:
    """Put the launch options of a run that is resumed before those that are given."""
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, given = option.partition("=")
        if name == "--resume" and (saved := Path(given or value) / FOLDER / LAUNCH_CONFIG).is_file():
            return ["--config", str(saved), *arguments]
    return arguments
