"""``rlplug export``: the policy of a run as a Hugging Face folder with a model card, and its upload to the Hub."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any, Final

import yaml
from rlplug_watch.config_values import is_plain
from rlplug_watch.own_files import own_text

from rlplug.cli.configuration.environment_values import resolve_variables
from rlplug.cli.lightning_cli import instantiation_errors
from rlplug.cli.parser import RLArgumentParser
from rlplug.config import RunConfig
from rlplug.distributed.checkpoints.files import CONFIG, MANIFEST, run_dir_of
from rlplug.distributed.checkpoints.reader import newest_whole
from rlplug.distributed.durable_files import explained, reason, remove, replace_folder
from rlplug.errors import ConfigError
from rlplug.interfaces.trainer import ModelConfig, ModelTrainer
from rlplug.models.export import export_policy
from rlplug.models.lora.config import LoRAConfig
from rlplug.models.lora.files import export_adapter
from rlplug.observability.terminal import say
from rlplug.plugin_manager import plugins
from rlplug.setup.inputs import read_inputs
from rlplug_eval.card import CARD, write_card
from rlplug_eval.hub import files_of, push, refuse_links
from rlplug_eval.policies import checkpoint_network, is_run

EXPORT_DESCRIPTION: Final = """the policy of a run as a Hugging Face folder with a model card; upload it to the Hub

  rlplug export runs/quickstart/001                              write the policy, where the run has not, and its card
  rlplug export runs/a/001/checkpoints/step-00000050 --to out    the policy of a checkpoint
  rlplug export runs/a/001 --push-to-hub me/my-policy            upload it to a repository, a private one if it is new

The card is README.md: base model and its licence, algorithm, rewards, data, curve, versions. One that is there stays,
unless --rewrite-card is given. Uploading takes the token of `hf auth login`, or of the variable HF_TOKEN.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "rlplug export", description=EXPORT_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or a checkpoint's")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="folder to write; default: policy/ of the run")
    parser.add_argument("--adapter", action="store_true", help="the LoRA adapter of the run, in place of the policy")
    parser.add_argument("--rewrite-card", action="store_true", help="write README.md anew")
    parser.add_argument("--push-to-hub", metavar="REPO", help="upload the folder to this repository")
    parser.add_argument("--public", action="store_true", help="make a new repository public; by default it is private")
    return parser


def export_command(arguments: list[str]) -> int:
    """Write a run's policy as a Hugging Face folder with a model card, or upload it: RUN --push-to-hub NAME.

    Raises:
        RLPlugError: The message names what is missing, or why the Hub refuses.
    """
    options = make_parser().parse_args(arguments)
    if options.public and options.push_to_hub is None:
        raise ConfigError("--public is of an upload: give --push-to-hub REPO too.")
    folder, run_dir = _folder(options.run, options.to, "adapter" if options.adapter else "policy")
    if options.rewrite_card or not (folder / CARD).exists():
        say(f"card: {write_card(run_dir, folder)}")
    say(f"folder: {folder}")
    if options.push_to_hub is not None:
        files = files_of(folder)
        kind = "a public" if options.public else "a private"
        say(f"uploading to {options.push_to_hub}, {kind} repository if it is new:")
        for name, size in files:
            say(f"  {name}  {size:,} bytes")
        say(f"uploaded: {push(folder, options.push_to_hub, not options.public)}")
    return 0


def _folder(place: Path, to: Path | None, kind: str) -> tuple[Path, Path]:
    """Return the folder with the files, written if it was not there, and that of the run."""
    if to is not None and to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"--to {to} is there already, and not empty: name another folder.")
    is_checkpoint = (place / MANIFEST).is_file()
    run_dir = run_dir_of(place.resolve()) if is_checkpoint else place
    if run_dir is None or not is_run(run_dir):
        raise ConfigError(f"{place} is no folder of a run, nor of a checkpoint in one: it has no {CONFIG}.")
    exported = run_dir / kind
    if is_checkpoint and to is None:
        raise ConfigError(f"{place} is a checkpoint: name the folder to write, with --to FOLDER.")
    if not is_checkpoint and exported.is_dir():
        refuse_links(exported)
        if to is not None:
            with explained(to):
                shutil.copytree(exported, to, dirs_exist_ok=True)
        return to or exported, run_dir
    checkpoint = place if is_checkpoint else newest_whole(run_dir)
    if checkpoint is None:
        raise ConfigError(f"{place} has neither {kind}/ nor a checkpoint that is whole: nothing is there to export.")
    folder = to or exported
    _export_checkpoint(checkpoint, folder, kind)
    return folder, run_dir


def config_of(checkpoint: Path) -> RunConfig:
    """Return the options of a checkpoint's models alone: no other class or function of its configuration is imported.

    Raises:
        ConfigError: They cannot be read, or name a trainer that no installed plugin has.
    """
    try:
        text = own_text(checkpoint / CONFIG)
        model = resolve_variables(yaml.safe_load(text) if is_plain(text) else {})["model"]
        given = {key: model[key] for key in ("policy", "trainer", "lora") if model.get(key) is not None}
        trainer = given.get("trainer", {"class_path": "TransformersTrainer"})
        trainer = {"class_path": trainer} if isinstance(trainer, str) else trainer
        name = str(trainer["class_path"]).rpartition(".")[2]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(f"{checkpoint / CONFIG} cannot be read: {reason(error)}.") from error
    found = plugins().registry.get("trainers", name)  # an import by its path would run any module
    given["trainer"] = {**trainer, "class_path": f"{found.__module__}.{found.__qualname__}"}
    parser = RLArgumentParser("rlplug export")
    parser.add_argument("--model.policy", type=ModelConfig)
    parser.add_argument("--model.trainer", type=ModelTrainer | None, default=None)
    parser.add_argument("--model.lora", type=LoRAConfig | None, default=None)
    with instantiation_errors():
        parts: Any = parser.instantiate_classes(parser.parse_object({"model": given})).model
    unused: Any = None  # an export neither trains nor scores
    return RunConfig(parts.policy, algorithm=unused, optimizer=unused, trainer=parts.trainer, lora=parts.lora)


def _export_checkpoint(checkpoint: Path, folder: Path, kind: str) -> None:
    config = config_of(checkpoint)
    if kind == "adapter" and config.lora is None:
        raise ConfigError(f"{checkpoint} is of a run without model.lora: there is no adapter.")
    network = checkpoint_network(config, checkpoint)
    partial = folder.with_name(folder.name + ".partial")
    with explained(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
    if kind == "adapter" and config.lora is not None:
        export_adapter(network, config.lora, config.policy, partial, rank=0)
    else:
        inputs = read_inputs(config)
        export_policy(network, inputs.tokenizer, inputs.spec.dtype, partial, 0, config.model_trainer)
    replace_folder(partial, folder)
