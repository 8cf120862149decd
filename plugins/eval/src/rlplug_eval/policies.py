"""Policies to evaluate: model folders, Hugging Face Hub names and checkpoints, and their weights for an engine."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from torch import nn

from rlplug.config import RunConfig
from rlplug.distributed.checkpoints.files import CONFIG, MANIFEST
from rlplug.distributed.checkpoints.reader import find_damage, newest_whole, read_checkpoint, require_whole
from rlplug.errors import ConfigError
from rlplug.interfaces.rollout import PolicySpec
from rlplug.interfaces.trainer import ModelConfig
from rlplug.interfaces.weight_sync import Bucket
from rlplug.models.build import Models, empty_network
from rlplug.models.hf_files import check_folder, read
from rlplug.models.loading import load_model, stored_weights, to_empty_on
from rlplug.models.lora.adapters import add_adapters, load_adapters
from rlplug.models.weight_files import weight_files
from rlplug.training.trainer_record import adapter_record, check_records
from rlplug.weight_sync.buckets import policy_buckets, weight_buckets
from rlplug.weight_sync.config import WeightSyncConfig
from rlplug.weight_sync.manifest import policy_weights

KEY: Final = "policy"
"""Stands for the policy's key in messages: there is no configuration key for it."""
_NAMED: Final = re.compile(r"([\w.+-]+)=(.+)")
_HUB_NAME: Final = re.compile(r"\w[\w.-]*(?:/[\w.-]+)?")


@dataclass(frozen=True)
class Policy:
    """One policy to evaluate, or to chat with."""

    name: str
    """Its name in tables."""
    model: ModelConfig
    """Folder or Hub name with configuration and tokenizer, and, unless there is a ``checkpoint``, the weights."""
    checkpoint: Path | None = None
    """Checkpoint of a run, whose weights are loaded into a network of the run's trainer."""

    @property
    def source(self) -> str:
        """Where the weights are, as text."""
        if self.checkpoint is not None:
            return str(self.checkpoint)
        return self.model.path + (f" (random, seed {self.model.seed})" if self.model.init == "random" else "")


def is_run(folder: Path) -> bool:
    """Return whether a folder is one that a run has written."""
    return (folder / CONFIG).is_file() and not (folder / MANIFEST).exists()


def split_name(argument: str) -> tuple[str | None, str]:
    """Split ``NAME=PLACE``, where there is a name and no such file or folder."""
    found = None if Path(argument).exists() else _NAMED.fullmatch(argument)
    return (found[1], found[2]) if found else (None, argument)


def place_of(argument: str) -> tuple[str, Path | None]:
    """Return what an argument names: a folder or Hub name with weights, or a run folder and its checkpoint.

    Args:
        argument: A run folder, a checkpoint's folder, a Hugging Face folder or a name on the Hub. A run folder stands
            for its exported policy, and without one for its newest checkpoint that is whole.

    Raises:
        ConfigError: It is a run folder that has neither.
    """
    path = Path(argument)
    if (path / MANIFEST).is_file():
        return argument, path
    if not is_run(path):
        return argument, None
    if (path / "policy" / "config.json").is_file():
        return str(path / "policy"), None
    if (found := newest_whole(path)) is not None:
        return str(found), found
    raise ConfigError(
        f"{argument} is a run without an exported policy, and without a checkpoint that is whole: nothing is there to "
        "evaluate."
    )


def require_model(place: str) -> None:
    """Refuse a place, of those that :func:`place_of` returns without a checkpoint, that holds no model.

    Raises:
        ConfigError: It is a file, a folder without ``config.json``, or neither a folder nor a name of the Hub, whose
            cache, where the Hub cannot be reached, lacks it.
    """
    path = Path(place)
    if not path.exists() and _HUB_NAME.fullmatch(place):
        check_folder(place, KEY)
    elif not (path / "config.json").is_file():
        what = "is no folder of a model: it has no config.json" if path.exists() else "does not exist"
        raise ConfigError(
            f"the policy {place!r} {what}. Give the folder of a run, a checkpoint or a Hugging Face model, or a name "
            "on the Hub."
        )


def label_of(argument: str) -> str:
    """Return a short name for a policy: ``quickstart/001`` of ``runs/quickstart/001``, ``step-00000050`` with it."""
    parts = [part for part in Path(argument).parts if part not in ("/", "..", ".", "runs", "checkpoints")]
    return "/".join(parts[-3 if parts and parts[-1].startswith("step-") else -2 :]) or argument


def stamp(policy: Policy) -> str:
    """Return a checksum of names, sizes and times of a policy's files; of a Hub name, of the name alone."""
    folder = policy.checkpoint or Path(policy.model.path)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [(path.name, stat.st_size, stat.st_mtime_ns) for path in files if (stat := path.stat())]
    weights = (policy.model.init, policy.model.seed) if policy.model.init == "random" else ()
    return xxhash.xxh3_128(repr((policy.source, weights, found)).encode()).hexdigest()


# ---- weights ------------------------------------------------------------------------------------------------------


def folder_buckets(model: ModelConfig, spec: PolicySpec, max_bytes: int, device: torch.device) -> Iterator[Bucket]:
    """Yield the weights of a model folder as an engine gets them, read from the files one after another.

    Where the files have other names than a checkpoint of transformers' newest form, the model is loaded whole.

    Args:
        model: Folder or Hub name, or a configuration whose weights are drawn.
        spec: What the engine was told; weights are sent in its dtype.
        max_bytes: Largest size of a bucket, unless it is a single weight.
        device: Device of the buckets.

    Raises:
        ConfigError: The weights cannot be read.
    """
    shapes = {name: weight.shape for name, weight in policy_weights(spec).items()}
    if (
        model.init == "pretrained"
        and not shapes.keys() <= read(model.path, KEY, "weights", weight_files, model.path).keys()
    ):
        for whole in weight_buckets(load_model(model, KEY), spec.dtype, max_bytes):
            yield [(name, weight.to(device)) for name, weight in whole]
        return
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, stored in stored_weights(model, KEY, shapes, device):
        weight = stored[:].to(device, spec.dtype, copy=True)
        if bucket and size + weight.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, weight))
        size += weight.nbytes
    if bucket:
        yield bucket


def checkpoint_network(config: RunConfig, checkpoint: Path) -> nn.Module:
    """Return a run's policy with the weights of one of its checkpoints, on the CPU and in float32, not sharded.

    Args:
        config: Options of the run that wrote the checkpoint.
        checkpoint: Its folder.

    Raises:
        RunError: The checkpoint is damaged, or does not fit the network.
        ConfigError: It is of another trainer or base model than ``config`` names.
    """
    require_whole(checkpoint, [find_damage(checkpoint)])
    trainer, model, key = config.model_trainer, config.policy, "model.policy"
    network: Any = empty_network(trainer, model, key)
    if config.lora is not None:
        add_adapters(network, config.lora, model.torch_dtype)
    to_empty_on(network, torch.device("cpu"))
    if hasattr(network, "tie_weights"):
        network.tie_weights()  # to_empty_on made a new parameter of each, so the tie was lost
    trainer.load_weights(network, model, key)
    if config.lora is not None:
        load_adapters(network, config.lora)
    owner = nn.Module()  # with the names that the run's module gave its parameters
    owner.models = Models(network)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # there is one process
        read_checkpoint(checkpoint, owner, [], partial(check_records, trainer, adapter_record(network, list)))
    loaded: nn.Module = network
    return loaded


def checkpoint_buckets(
    config: RunConfig, network: nn.Module, spec: PolicySpec, device: torch.device
) -> Iterator[Bucket]:
    """Yield the weights of :func:`checkpoint_network` as an engine gets them, with adapters merged."""
    weights = config.model_trainer.hf_weights(network)
    for bucket in policy_buckets(network, spec, config.weight_sync.bucket_mib << 20, weights):
        yield [(name, weight.to(device)) for name, weight in bucket]


def config_for(config: RunConfig, model: ModelConfig) -> RunConfig:
    """Return options of a run for an evaluation of ``model``: without what only training needs.

    Weights go to the engine in the model's dtype, also where a run sends them in FP8, with adapters merged, also where
    a run sends these alone, and no experts are recorded.
    """
    sync = WeightSyncConfig(bucket_mib=config.weight_sync.bucket_mib)
    return replace(config, policy=model, weight_sync=sync, lora=None, router_replay=False, partial_rollout=None)
