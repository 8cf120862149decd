"""The model that is looked at, loaded as a run loads its policy: what each check asks for is loaded once."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.errors import ConfigError
from rlplug.interfaces.optimization import Effect
from rlplug.interfaces.rollout import PolicySpec
from rlplug.interfaces.trainer import ModelConfig
from rlplug.models.build import empty_network
from rlplug.models.config import load_spec, load_tokenizer
from rlplug.models.hf_files import read
from rlplug.models.loading import to_empty_on
from rlplug.models.transformers_trainer import TRANSFORMERS
from rlplug.models.weight_files import weight_files
from rlplug.plugin_manager import plugins
from rlplug_devkit.doctor.host import available_memory, gib
from rlplug_devkit.doctor.model.results import NotLoadedError

KEY: Final = "model.policy"
COPIES: Final = 3
"""Times the weights are in memory: themselves, and the gradients of two passes, one of them always on the host."""


T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What the command was asked for."""

    config: ModelConfig
    device: torch.device
    num_layers: int | None
    """Layers to keep, from the first; ``None`` for all."""


class Subject:
    """A model, its tokenizer and its files; each is loaded when a check first asks for it.

    Raises:
        NotLoadedError: By every property, where loading what it is failed before.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.config = options.config
        self._failed: set[str] = set()

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        make = plugins().hook.rlplug_make_tokenizer
        return self._once("tokenizer", lambda: load_tokenizer(self.config, KEY, make))

    @functools.cached_property
    def spec(self) -> PolicySpec:
        return self._once("tokenizer", lambda: load_spec(self.config, self.tokenizer))

    @functools.cached_property
    def files(self) -> dict[str, str]:
        """The safetensors file of each weight, by name."""
        path = self.config.path
        files: dict[str, str] = self._once("weights", lambda: read(path, KEY, "weights", weight_files, path))
        return files

    @functools.cached_property
    def whole(self) -> Any:
        """The whole network, on the meta device."""
        return self._once("network", lambda: empty_network(TRANSFORMERS, self.config, KEY))

    @functools.cached_property
    def loaded(self) -> tuple[Any, Effect]:
        """The network that is tried, with its weights, and how they were loaded."""
        loaded: tuple[Any, Effect] = self._once("weights", self._load)
        return loaded

    @property
    def vocab_size(self) -> int:
        return self.whole.config.get_text_config().vocab_size  # type: ignore[no-any-return]

    @property
    def model(self) -> Any:
        return self.loaded[0]

    @property
    def num_layers(self) -> tuple[int, int]:
        """Layers that are tried, and those of the model."""
        every = len(transformer_blocks(self.whole))
        return min(self.options.num_layers or every, every), every

    def bytes_of(self, num_layers: int) -> int:
        """Return the bytes of the weights of so many layers, and of what is around the layers."""
        size: int = self.config.torch_dtype.itemsize
        counts = [sum(each.numel() for each in block.parameters()) for block in transformer_blocks(self.whole)]
        around = sum(each.numel() for each in self.whole.parameters()) - sum(counts)
        return size * int(around + sum(counts[:num_layers]))

    def _once(self, what: str, load: Callable[[], T]) -> T:
        if what in self._failed:
            raise NotLoadedError(f"the {what} could not be loaded")
        try:
            return load()
        except Exception:
            self._failed.add(what)
            raise

    def _load(self) -> tuple[Any, Effect]:
        self._check_memory()
        model: Any = empty_network(TRANSFORMERS, self.config, KEY)
        if self.options.num_layers is not None:
            cut_layers(model, self.options.num_layers)
        to_empty_on(model, self.options.device)
        model.tie_weights()  # to_empty_on made a new parameter of each, so the tie was lost
        loaded = TRANSFORMERS.load_weights(model, self.config, KEY)
        for parameter in model.parameters():  # as FSDP casts them for a pass; buffers, such as RoPE's, stay float32
            parameter.data = parameter.data.to(self.config.torch_dtype)
        return model, loaded

    def _check_memory(self) -> None:
        """Refuse a model that the memory does not hold, before the system ends this process.

        Raises:
            ConfigError: The message says how many layers fit.
        """
        device = self.options.device
        memories = [(available_memory(), COPIES, "host")]
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            memories = [(available_memory(), 1, "host"), (free, COPIES - 1, str(device))]
        for free, copies, where in memories:
            needed = copies * self.bytes_of(self.num_layers[0])
            if needed <= free:
                continue
            fits = [each for each in range(1, self.num_layers[0]) if copies * self.bytes_of(each) <= free]
            advice = f"--layers {fits[-1]} fits" if fits else "not even one layer fits"
            raise ConfigError(
                f"{copies} times the weights, for gradients, are {gib(needed)}, and {where} has {gib(free)}: {advice}; "
                "--dtype bfloat16 halves them."
            )


def cut_layers(model: Any, num_layers: int) -> None:
    """Leave out the layers after the first ones, in a model and in its configuration.

    Raises:
        ConfigError: The layers have a form that cannot be cut.
    """
    blocks, text = transformer_blocks(model), model.config.get_text_config()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and list(module) == blocks:
            del module[num_layers:]
    for option, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == len(blocks):  # one entry for each layer, such as layer_types
            setattr(text, option, value[:num_layers])
    text.num_hidden_layers = min(num_layers, len(blocks))
    if len(transformer_blocks(model)) != text.num_hidden_layers:
        raise ConfigError(
            f"--layers: the layers of {type(model).__name__} are in no list that can be cut: leave it out."
        )


def device_of(name: str | None) -> torch.device:
    """Return a device by its name; by default the first GPU, or the CPU where there is none.

    Raises:
        ConfigError: There is no such device.
    """
    chosen = name or ("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(chosen)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {chosen}: {str(error).splitlines()[0]}. Give cpu, cuda or cuda:N.") from error
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def size_of_files(subject: Subject) -> str:
    """Return the size of the weights' files in words."""
    files = set(subject.files.values())
    return f"{gib(sum(os.path.getsize(file) for file in files))} in {len(files)} file{'s' * (len(files) > 1)}"
