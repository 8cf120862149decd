"""LoRA: low-rank adapters train, through peft's layers, and the policy's own weights stay as they are.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlplug.distributed.mesh import local_part
from rlplug.errors import ConfigError
from rlplug.interfaces.optimization import Effect
from rlplug.interfaces.trainer import ModelConfig
from rlplug.models.loading import copy_part, empty_model
from rlplug.weight_sync.low_rank import Adapters, LowRankUpdate, adapters_of, attach_adapters

ADAPTER: Final = "default"
"""peft's name of the only adapter."""
WEIGHTS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"
UNSUPPORTED: Final = ("use_dora", "use_rslora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern")
"""Options of peft that change what an adapter computes."""
PREFIX: Final = "base_model.model."
"""Before the names of weights in peft's files."""


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters, ``model.lora``: W + alpha / rank * B A for each matrix W; B and A train, W does not.

    There is no dropout: a pass with dropout computes other logprobs than the engine sampled with.

    Args:
        rank: Rank r of the adapters.
        alpha: Their updates are scaled by alpha / rank.
        targets: ``all-linear``, for all linear layers but the output layer, or the last parts of their names, such as
            ``[q_proj, v_proj]``.
        path: Folder of an adapter to start from, as peft and this trainer's export write it; its rank, alpha and
            targets must be the ones above. By default B starts at zero, so that the policy starts as it is.
        seed: Seed of A; 0 follows ``seed_everything``.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: str | list[str] = "all-linear"
    path: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.targets != "all-linear" and isinstance(self.targets, str):
            raise ConfigError(f"model.lora.targets is {self.targets!r}: give all-linear, or a list of layers' names.")
        if not self.targets:
            raise ConfigError("model.lora.targets is empty: name layers, or give all-linear.")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def add_adapters(network: nn.Module, config: LoRAConfig, dtype: torch.dtype) -> Effect:
    """Put adapters into a network on the meta device, freeze all else, and keep what is frozen in ``dtype``.

    Raises:
        ConfigError: peft is missing, no layer has such a name, or a layer is none that can be adapted here.
    """
    peft = _import_peft()
    total = sum(parameter.numel() for parameter in network.parameters())
    options = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=config.targets)
    output: Any = network
    output_layer = output.get_output_embeddings()
    try:
        peft.inject_adapter_in_model(options, network, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(f"model.lora.targets is {config.targets}: {' '.join(str(error).split())}") from error
    if output.get_output_embeddings() is not output_layer:
        raise ConfigError("model.lora.targets names the output layer, whose logprobs are computed from its own weight.")
    attach_adapters(network, _record(network, config))
    for parameter in network.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    adapters = adapters_of(network)
    assert adapters is not None
    return Effect(
        f"LoRA of rank {config.rank} on {len(adapters.updates)} modules: {_count(trained)} parameters train, "
        f"{_count(total)} are frozen in {str(dtype).removeprefix('torch.')}"
    )


def num_adapter_parameters(policy: ModelConfig, config: LoRAConfig) -> int:
    """Return the number of parameters that train, without loading a weight."""
    network = empty_model(policy)
    add_adapters(network, config, policy.torch_dtype)
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


@torch.no_grad()
def load_adapters(network: nn.Module, config: LoRAConfig) -> Effect:
    """Give the adapters of a sharded network their first values: drawn, or those of ``config.path``.

    Every rank draws all of A on the host, so that values depend neither on the ranks nor on the device.

    Raises:
        ConfigError: The folder holds no such adapter.
    """
    adapters = adapters_of(network)
    assert adapters is not None
    if config.path is not None:
        return _load_folder(adapters, config)
    generator = torch.Generator().manual_seed(config.seed)
    for update in adapters.updates.values():
        down = update.down.weight
        bound = 1 / math.sqrt(down.shape[1])  # of kaiming_uniform_ with a = sqrt(5), which peft takes
        copy_part(down, torch.empty(down.shape).uniform_(-bound, bound, generator=generator))
        local_part(update.up.weight).zero_()
    return Effect(f"adapters drawn with seed {config.seed}: the policy starts as the frozen model")


class WithoutAdapters(nn.Module):
    """A network with its adapters switched off while it runs: the reference policy, without a second copy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._network = [network]  # in a list: its parameters belong to the policy
        self._layers = list(_layers(network))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._network[0], name)

    def forward(self, **inputs: Any) -> Any:
        with self._switched_off():
            return self._network[0](**inputs)

    @contextmanager
    def _switched_off(self) -> Iterator[None]:
        """Switch adapters off by the flag that peft's layers read; its own method also edits ``requires_grad``."""
        for layer in self._layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False


def export_adapter(network: nn.Module, config: LoRAConfig, policy: ModelConfig, folder: Path, rank: int) -> None:
    """Write a folder that ``PeftModel.from_pretrained`` opens. Collective; rank 0 writes.

    Args:
        network: The policy, sharded or not.
        config: Its adapters' configuration.
        policy: Configuration of the frozen model, which the folder names.
        folder: Folder to write, made if it does not exist.
        rank: Rank of this process.
    """
    adapters = adapters_of(network)
    assert adapters is not None
    weights = {name: _whole(parameter).detach().cpu() for name, parameter in _in_files(adapters).items()}
    if rank:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    options = _import_peft().LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=sorted({_module_of(name).rpartition(".")[2] for name in adapters.updates}),
        base_model_name_or_path=policy.path,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    options.save_pretrained(str(folder))


# ---- parts ----------------------------------------------------------------------------------------------------------


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("model.lora needs peft: pip install 'rlplug[lora]'.") from error
    return peft


def _layers(network: nn.Module) -> Iterator[Any]:
    """Yield peft's layers."""
    adapters = adapters_of(network)
    assert adapters is not None
    for name in adapters.updates:
        yield network.get_submodule(_module_of(name))


def _record(network: nn.Module, config: LoRAConfig) -> Adapters:
    updates, plain_names = {}, {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            continue
        plain_names[name] = name.replace(".base_layer.", ".")
        if name.endswith(".base_layer.weight"):
            layer: Any = network.get_submodule(_module_of(name))
            if not isinstance(layer.base_layer, nn.Linear):
                raise ConfigError(
                    f"model.lora.targets names {_module_of(name)}, which is "
                    f"{type(layer.base_layer).__name__}: rlplug adapts linear layers."
                )
            updates[name] = LowRankUpdate(layer.lora_A[ADAPTER], layer.lora_B[ADAPTER], config.scale)
    return Adapters(updates, plain_names)


def _in_files(adapters: Adapters) -> dict[str, Tensor]:
    """Return the adapters' parameters by their names in peft's files."""
    found: dict[str, Tensor] = {}
    for name, update in adapters.updates.items():
        module = PREFIX + _module_of(name)
        found |= {f"{module}.lora_A.weight": update.down.weight, f"{module}.lora_B.weight": update.up.weight}
    return found


def _module_of(name: str) -> str:
    return name.removesuffix(".base_layer.weight")


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _load_folder(adapters: Adapters, config: LoRAConfig) -> Effect:
    """Load what ``config.path`` holds, once its options and all its weights are found to be those of the network."""
    key = f"model.lora.path {config.path!r}"
    folder = Path(str(config.path))
    try:
        options = json.loads((folder / CONFIG).read_text())
        with safe_open(folder / WEIGHTS, framework="pt") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{key} is no folder of an adapter with {CONFIG} and {WEIGHTS}: {error}") from error
    for name, own, option in (("rank", config.rank, "r"), ("alpha", config.alpha, "lora_alpha")):
        if options.get(option) != own:
            raise ConfigError(f"model.lora.{name} is {own}, and {key} has {options.get(option)}: set it to that.")
    if unknown := [name for name in UNSUPPORTED if options.get(name)]:
        raise ConfigError(f"{key} was trained with {', '.join(unknown)} of peft, which rlplug does not have.")
    targets = _in_files(adapters)
    if targets.keys() != weights.keys():
        name = sorted(targets.keys() ^ weights.keys())[0]
        raise ConfigError(
            f"{key} adapts {len(weights) // 2} modules and model.lora.targets {len(targets) // 2}; only one of them "
            f"has {name}: set model.lora.targets to the adapter's."
        )
    for name, target in targets.items():
        if target.shape != weights[name].shape or not weights[name].isfinite().all():
            raise ConfigError(f"{key}: {name} is not finite, or its shape is not {list(target.shape)}.")
    for name, target in targets.items():
        copy_part(target, weights[name])
    return Effect(f"adapters loaded from {config.path}")


def _count(number: int) -> str:
    """Return a number of parameters as people write it, such as ``4.9M``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
