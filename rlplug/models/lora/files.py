"""Folders of adapters, as peft writes and opens them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlplug.distributed.durable_files import of_user
from rlplug.errors import ConfigError
from rlplug.interfaces.optimization import Effect
from rlplug.interfaces.trainer import ModelConfig
from rlplug.models.loading import copy_part
from rlplug.models.lora.config import LoRAConfig
from rlplug.weight_sync.hf_names import adapters_of
from rlplug.weight_sync.low_rank import Adapters

WEIGHTS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"
UNSUPPORTED: Final = ("use_dora", "use_rslora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern")
"""Options of peft that change what an adapter computes."""
PREFIX: Final = "base_model.model."
"""Before the names of weights in peft's files."""


def import_peft() -> Any:
    """Return peft, which is optional.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("model.lora needs peft: pip install 'rlplug[lora]'.") from error
    return peft


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
    with of_user(folder / WEIGHTS):
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    options = import_peft().LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=sorted({module_of(name).rpartition(".")[2] for name in adapters.updates}),
        base_model_name_or_path=policy.path,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    options.save_pretrained(str(folder))


def load_folder(adapters: Adapters, config: LoRAConfig) -> Effect:
    """Load what ``config.path`` holds, once its options and all its weights are found to be those of the network."""
    key = f"model.lora.path {config.path!r}"
    folder = Path(os.path.expanduser(str(config.path)))
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


def _in_files(adapters: Adapters) -> dict[str, Tensor]:
    """Return the adapters' parameters by their names in peft's files."""
    found: dict[str, Tensor] = {}
    for name, update in adapters.updates.items():
        module = PREFIX + module_of(name)
        found |= {f"{module}.lora_A.weight": update.down.weight, f"{module}.lora_B.weight": update.up.weight}
    return found


def module_of(name: str) -> str:
    """Return the name of the module whose frozen matrix has ``name``."""
    return name.removesuffix(".base_layer.weight")


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
