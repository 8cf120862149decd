"""Weights in the safetensors files of a model."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from rlplug.distributed.mesh import local_part, local_slices
from rlplug.errors import ConfigError
from rlplug.interfaces.trainer import ModelConfig
from rlplug.models.hf_files import pretrained, read

PLAIN_DTYPES: Final = ("F64", "F32", "F16", "BF16")
"""Dtypes of safetensors files that are read without dequantisation."""


def weight_files(path: str) -> dict[str, str]:
    """Return the safetensors file of each weight, by name; downloads the files of a Hub repository.

    Raises:
        OSError: There is neither an index nor a single file.
    """
    index = cached_file(path, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is None:
        file: Any = cached_file(path, "model.safetensors")
        with safe_open(file, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), file)
    files, _ = get_checkpoint_shard_files(path, index)
    by_name = {Path(file).name: file for file in files}
    written: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
    return {name: by_name[file] for name, file in written.items()}


def stream(weights: Mapping[str, Tensor], files: Mapping[str, str]) -> None:
    """Read this rank's shard of each tensor, one tensor at a time.

    Upstream's ``HuggingFaceStorageReader`` reads the same shards, but only in a collective load whose errors come
    wrapped from all ranks, and casts any dtype, such as float8 without its scales.
    """
    with ExitStack() as stack:
        opened = {
            file: stack.enter_context(safe_open(file, framework="pt"))
            for file in sorted({files[name] for name in weights})
        }
        for name, weight in weights.items():
            stored = checked_slice(opened[files[name]], name, weight.shape)
            local_part(weight).copy_(stored[local_slices(weight)])


def checked_slice(opened: Any, name: str, shape: torch.Size) -> Any:
    """Return the slice of an open safetensors file from which a tensor is read.

    Raises:
        ValueError: The tensor has another shape, or a dtype that needs dequantisation.
    """
    stored = opened.get_slice(name)
    if list(stored.get_shape()) != list(shape):
        raise ValueError(f"{name} has shape {stored.get_shape()} in the file and {list(shape)} by config.json")
    if stored.get_dtype() not in PLAIN_DTYPES:
        raise ValueError(f"{name} is stored as {stored.get_dtype()}, not as one of {', '.join(PLAIN_DTYPES)}")
    return stored


def whole_weights(config: ModelConfig, key: str, wanted: Iterable[str]) -> dict[str, Tensor]:
    """Return the checkpoint's weights as transformers loads them, under the names of its model."""
    options: dict[str, Any] = {"dtype": "auto", "use_safetensors": True, "output_loading_info": True}
    make = AutoModelForCausalLM.from_pretrained
    with torch.random.fork_rng(devices=[]):  # transformers draws decays before it reads them
        whole, info = read(config.path, key, "weights", pretrained, make, config.path, **options)
    if missing := sorted({*wanted} & {*info["missing_keys"]}):
        raise incomplete(config, key, missing)
    state: dict[str, Tensor] = whole.state_dict()
    return state


def incomplete(config: ModelConfig, key: str, missing: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{key}.path {config.path!r} has no value for {len(missing)} weights, first {missing[0]!r}: "
        "the folder is incomplete, or its config.json belongs to another model. Copy its files again."
    )


def sliced_weights(config: ModelConfig, key: str, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, Any]]:
    """Yield slices of the weights in ``shapes`` one after another, under their names; see ``stored_weights``."""
    files = read(config.path, key, "weights", weight_files, config.path)
    if missing := sorted(shapes.keys() - files.keys()):
        raise incomplete(config, key, missing)
    in_file: dict[str, list[str]] = defaultdict(list)
    for name in shapes:
        in_file[files[name]].append(name)
    for file, names in in_file.items():  # one file is mapped into memory at a time
        with read(config.path, key, "weights", safe_open, file, framework="pt") as opened:
            for name in names:
                yield name, read(config.path, key, "weights", checked_slice, opened, name, shapes[name])
