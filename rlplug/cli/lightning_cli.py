"""LightningCLI of the commands ``fit`` and ``validate``, with short names of plugins' classes and plain errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only

from rlplug.cli.configuration.config_files import check_config_files
from rlplug.cli.configuration.environment_values import with_plain_texts, with_references
from rlplug.cli.configuration.option_checks import check_options, seed_all
from rlplug.cli.configuration.replaced_classes import FILES, KEY_DEFAULTS
from rlplug.cli.configuration.short_forms import with_defaults, write_out_arguments
from rlplug.cli.configuration.trainer_options import TRAINER_DEFAULTS, check_trainer_options
from rlplug.cli.parser import RLArgumentParser
from rlplug.data.datamodule import PromptDataModule
from rlplug.distributed.checkpoint import RLCheckpoint
from rlplug.distributed.durable_files import require_no_file
from rlplug.distributed.ranks import lost_rank
from rlplug.distributed.stop_signal import end_at_once
from rlplug.errors import ConfigError, RLPlugError, RunError
from rlplug.module import RLModule
from rlplug.observability.progress import RLProgressBar
from rlplug.observability.start import quieten_libraries
from rlplug.plugin_manager import plugins
from rlplug.recording.profiler import StepProfiler
from rlplug.recording.run_folder import DEFAULT_COMPILE_CACHE, RunFolder

CLI = TypeVar("CLI", bound="RLCLI")
_COMMANDS: Final = {
    "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
    "validate": {"model", "dataloaders", "datamodule"},
}
"""Commands, and the arguments of the trainer's method that are no options."""


class RLCLI(LightningCLI):
    """LightningCLI with the keys ``model``, ``data``, ``run``, ``checkpoint`` and ``profile``."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        optimizer: Any = next(each for each in parser._actions if each.dest == "model.optimizer")
        KEY_DEFAULTS[:] = [parser.get_default(optimizer.dest)]
        optimizer.sub_add_kwargs["key_default"] = KEY_DEFAULTS[0]  # for RLArgumentParser.add_class_arguments
        parser.add_lightning_class_args(RunFolder, "run")
        parser.add_lightning_class_args(RLCheckpoint, "checkpoint")
        parser.add_lightning_class_args(StepProfiler, "profile")

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the command that the command line names: the parser of another takes 0.2 s to build."""
        return {sys.argv[1]: _COMMANDS[sys.argv[1]]}

    def _parse_ckpt_path(self) -> None:
        """Do nothing, where Lightning would take options from a checkpoint that is a file: ours is a folder."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the configuration and check the resolved options.

        Raises:
            ConfigError: The message names the key, the value and the fix.
        """
        with instantiation_errors():
            super().parse_arguments(parser, args)
        options, config = self._parser(self.config.subcommand), self.config[self.config.subcommand]
        check_options(config)
        defaults = {name: options.get_default(f"trainer.{name}") for name in vars(config.trainer)}
        check_trainer_options(config.trainer, defaults)
        if config.ckpt_path is not None:
            from rlplug.cli.configuration.resume import check_checkpoint

            check_checkpoint(config.ckpt_path)

    def before_instantiate_classes(self) -> None:
        """Keep the options as they were given, with references to variables, and give every seed its number."""
        config = self.config[self.config.subcommand]
        saved = config.clone()
        saved.ckpt_path = None  # a run from the saved file does not resume
        # a reference has not the type of its option, which the parser has checked
        parser = self._parser(self.subcommand)
        self.config_yaml = parser.dump(with_references(saved), skip_none=False, skip_validation=True)
        self.config_dump = yaml.safe_load(self.config_yaml)  # what Lightning keeps as hyperparameters
        self.config[self.config.subcommand] = config = with_plain_texts(config)
        seed_all(config)

    def instantiate_classes(self) -> None:
        with instantiation_errors():
            super().instantiate_classes()
        run_folder: RunFolder = self._get(self.config_init, "run")
        run_folder.resumed_from = self.config[self.config.subcommand].ckpt_path
        run_folder.config_yaml = self.config_yaml
        is_first = getattr(rank_zero_only, "rank", 0) == 0  # only this rank knows which checkpoint is whole
        if run_folder.resumed_from is not None and self.subcommand == "fit" and is_first:
            from rlplug.cli.configuration.resume import config_of

            run_folder.former_config = config_of(run_folder.resumed_from)

    def before_fit(self) -> None:
        """Let a signal close what is started from now on, and refuse a folder that cannot be made."""
        end_at_once()
        run_folder: RunFolder = self._get(self.config_init, "run")
        if run_folder.resumed_from is None:
            require_no_file(Path(run_folder.dir), "run.dir")
        self.use_compile_cache()
        self.model.start_timer.begin("data")

    before_validate = before_fit

    def use_compile_cache(self) -> None:
        """Keep what this process compiles where ``run.compile_cache`` says; its default needs no plugin."""
        run_folder: RunFolder = self._get(self.config_init, "run")
        folder, registry = run_folder.compile_cache, plugins().registry
        is_default = folder == DEFAULT_COMPILE_CACHE
        if folder is not None and not (is_default and "CompileCache" not in registry.names("classes")):
            make = registry.get_for("run.compile_cache", "CompileCache")
            run_folder.cache_note = make(folder, self.model.config.engine, is_default).note

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Make the trainer, with callbacks in the order in which a step needs them."""
        options = self._get(self.config_init, "trainer")
        callbacks = options.callbacks if isinstance(options.callbacks, list) else [options.callbacks]
        kwargs["enable_checkpointing"] = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
        if options.enable_progress_bar is False:
            self.trainer_defaults.pop("callbacks")
        trainer: Any = super().instantiate_trainer(**kwargs)
        trainer.callbacks = in_order(trainer.callbacks)
        return trainer


def in_order(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return a trainer's callbacks in the order in which a step needs them, with what calls Lightning's own.

    The run folder's ``setup`` names the folder; Lightning's own and the checkpoint of a last step follow what may make
    it the last, and a profile has the checkpoints of its steps.
    """
    first = [each for each in callbacks if isinstance(each, RunFolder)]
    last = [each for each in callbacks if isinstance(each, RLCheckpoint)]
    profiling = [made for each in callbacks if isinstance(each, StepProfiler) for made in each.callbacks]
    others = [each for each in callbacks if not isinstance(each, RunFolder | RLCheckpoint | StepProfiler)]
    called: list[Callback] = [each for each in others if isinstance(each, EarlyStopping | ModelCheckpoint)]
    if called:
        make = plugins().registry.get_for(type(called[0]).__name__, "LightningCallbacks")
        called = [make(called), *called]
    return [*first, *(each for each in others if each not in called), *called, *last, *profiling]


class ConfiguredCLI(RLCLI):
    """CLI that builds the parts of a ``fit`` configuration without a trainer, and runs nothing."""

    @property
    def trainer_options(self) -> Any:
        """Options under ``trainer``, as objects."""
        return self._get(self.config_init, "trainer")

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None

    def _run_subcommand(self, subcommand: str) -> None:
        pass


@contextmanager
def instantiation_errors() -> Iterator[None]:
    """Turn what the constructor of a configured class raises into one message.

    Raises:
        RLPlugError: The constructor's own message, where it raised one.
        ConfigError: Otherwise; the message names the class.
    """
    try:
        yield
    except Exception as error:
        from rlplug.cli.messages import explain_constructor

        raise explain_constructor(error) from error


def run_lightning(arguments: list[str]) -> int:
    """Run ``fit`` or ``validate``, and return its exit status: 130 after Ctrl-C and 143 after SIGTERM.

    Raises:
        RunError: Another rank has ended.
    """
    try:
        return int(read_command(RLCLI, arguments).model.stop_signal.exit_status)
    except RLPlugError:
        raise
    except RuntimeError as error:
        from rlplug.interfaces.memory_plan import out_of_memory

        if out_of_memory(error) or (message := lost_rank(error)) is None:  # NCCL's own allocations fail too
            raise
        raise RunError(message) from error


def read_command(cli_class: type[CLI], arguments: list[str]) -> CLI:
    """Parse a command line with ``cli_class``, which may also run the command, and return the CLI."""
    quieten_libraries()
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)  # for a reward function next to the configuration; after all libraries
    registry = plugins().registry
    if "--help-all" in arguments:
        registry.import_all()  # it lists the classes
    registry.import_named({argument.rpartition("=")[2] for argument in arguments})  # as in --model.algorithm.help GRPO
    arguments = ["--help" if argument == "--help-all" else argument for argument in write_out_arguments(arguments)]
    if any(argument.startswith(("--resume", "--ckpt_path")) for argument in arguments):
        from rlplug.cli.configuration.resume import with_resume

        arguments = with_resume(arguments)
    FILES[:] = contents = check_config_files(arguments)
    sys.argv[1:] = with_defaults(arguments, contents)  # LightningCLI reads it, and Lightning starts other ranks with it
    try:
        return cli_class(
            RLModule,
            PromptDataModule,
            save_config_callback=None,
            seed_everything_default=0,
            trainer_defaults={**TRAINER_DEFAULTS, "callbacks": [RLProgressBar()]},
            auto_configure_optimizers=False,
            parser_class=RLArgumentParser,
            parser_kwargs={"allow_abbrev": False, **{name: {"allow_abbrev": False} for name in RLCLI.subcommands()}},
        )
    except MisconfigurationException as error:  # Lightning's own error for invalid options of the trainer
        raise ConfigError(f"trainer: {error} Correct it.") from error
