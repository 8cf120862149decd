"""LightningCLI of the commands ``fit`` and ``validate``, with short names of plugins' classes and plain errors."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any, TypeVar

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from transformers.utils import logging as transformers_logging

from rlplug.cli.parser import RLArgumentParser
from rlplug.cli.run_folder import RunFolder
from rlplug.data.datamodule import PromptDataModule
from rlplug.distributed.checkpoint import RLCheckpoint, newest_checkpoint
from rlplug.errors import ConfigError
from rlplug.module import RLModule
from rlplug.observability.profiler import StepProfiler
from rlplug.observability.progress import RLProgressBar

CLI = TypeVar("CLI", bound="RLCLI")


class RLCLI(LightningCLI):
    """LightningCLI with the keys ``model``, ``data``, ``run``, ``checkpoint`` and ``profile``."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(RunFolder, "run")
        parser.add_lightning_class_args(RLCheckpoint, "checkpoint")
        parser.add_lightning_class_args(StepProfiler, "profile")

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            "validate": {"model", "dataloaders", "datamodule"},
        }

    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        run_folder: RunFolder = self._get(self.config_init, "run")
        config = self.config[self.config.subcommand]
        run_folder.resumed_from = config.ckpt_path
        saved = config.clone()
        saved.ckpt_path = None  # a run from the saved file does not resume
        run_folder.config_yaml = self._parser(self.subcommand).dump(saved, skip_none=False)


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


def run_lightning(arguments: list[str]) -> bool:
    """Run ``fit`` or ``validate``, and return whether Ctrl-C ended it."""
    return bool(read_command(RLCLI, arguments).model.stop_signal.is_set)


def read_command(cli_class: type[CLI], arguments: list[str]) -> CLI:
    """Parse a command line with ``cli_class``, which may also run the command, and return the CLI."""
    _quieten()
    RLArgumentParser.shows_trainer = "--help-all" in arguments
    arguments = ["--help" if argument == "--help-all" else argument for argument in arguments]
    sys.argv[1:] = _with_resume(arguments)  # LightningCLI reads it, and Lightning starts other ranks with it
    try:
        return cli_class(
            RLModule,
            PromptDataModule,
            save_config_callback=None,
            seed_everything_default=0,
            trainer_defaults={
                "strategy": {"class_path": "rlplug.distributed.strategy.RLFSDP2Strategy"},
                "accelerator": "auto",
                "devices": 1,
                "max_epochs": -1,
                "logger": False,
                "enable_checkpointing": False,
                "enable_model_summary": False,
                "use_distributed_sampler": False,
                "callbacks": [RLProgressBar()],
            },
            auto_configure_optimizers=False,
            parser_class=RLArgumentParser,
            parser_kwargs={"allow_abbrev": False, **{name: {"allow_abbrev": False} for name in RLCLI.subcommands()}},
        )
    except MisconfigurationException as error:  # Lightning's own error for invalid options of the trainer
        raise ConfigError(f"trainer: {error}") from error


def _quieten() -> None:
    """Silence messages of libraries that come with every run and need no action."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    shared = logging.getLogger("lightning.pytorch.utilities.rank_zero")  # rlplug and plugins call rank_zero_info too
    shared.setLevel(logging.INFO)
    shared.addFilter(lambda record: record.levelno >= logging.WARNING or "lightning" not in Path(record.pathname).parts)
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")  # Lightning 2.6 with torch 2.13
    transformers_logging.disable_progress_bar()


def _with_resume(arguments: list[str]) -> list[str]:
    """Replace ``--resume RUN`` by the run's own configuration and newest checkpoint; later options still override."""
    if "--resume" not in arguments:
        return arguments
    index = arguments.index("--resume")
    if index + 1 == len(arguments):
        raise ConfigError("--resume needs the folder of a run, such as runs/quickstart/001.")
    run_dir = Path(arguments[index + 1])
    checkpoint = newest_checkpoint(run_dir)
    return [
        arguments[0],
        *("--config", str(run_dir / "config.yaml"), "--ckpt_path", str(checkpoint)),
        *arguments[1:index],
        *arguments[index + 2 :],
    ]
