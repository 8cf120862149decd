"""The weights that are sent in FP8: chosen by type and position of their modules, and checked for NaN and infinity."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces.weight_sync import FP8Weights, HFWeight, WeightsOfParameters
from rlplug.weight_sync.config import WeightSyncConfig
from rlplug.weight_sync.hf_names import DECAYS, adapters_of, hf_weights

EXPERTS: Final = "experts"
"""Name of the experts' module in transformers, in every model that has experts."""


def choose_fp8_weights(model: Any, options: WeightSyncConfig) -> FP8Weights:
    """Return the weights to send in FP8: those of the linear layers inside the model's blocks.

    Each expert has linear layers of its own. Embeddings, norms and the output layer are kept in the policy's dtype, and
    so are the layers beside experts in the same module, which are routers or gates, and what computes decays.

    Args:
        model: The policy as transformers builds it; the meta device is enough.
        options: Further layers to keep.

    Raises:
        ConfigError: A pattern matches no layer, no layer is left, or a checkpoint has all experts in one tensor.
    """
    layers, num_blocks = _linear_layers(model), model.config.get_text_config().num_hidden_layers
    for pattern in options.keep:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise ConfigError(
                f"model.weight_sync.keep has {pattern!r}, which matches no linear layer: give a pattern of names "
                f"such as {next(iter(layers))!r} and {next(reversed(layers))!r}."
            )
    blocks = range(options.keep_first_layers, num_blocks - options.keep_last_layers)
    kept = {
        name: block not in blocks or any(fnmatchcase(name, pattern) for pattern in options.keep)
        for name, block in layers.items()
    }
    if all(kept.values()):
        raise ConfigError(
            f"model.weight_sync keeps all {len(kept)} linear layers, and none would be sent in FP8: keep fewer, or "
            "set dtype to null."
        )
    return FP8Weights(
        quantized=tuple(f"{name}.weight" for name in kept if not kept[name]),
        kept=tuple(f"{name}.weight" for name in kept if kept[name]),
        power_of_two_scales=options.power_of_two_scales,
    )


def describe(fp8: FP8Weights) -> str:
    """Return a summary, for users, of the layers that are quantised and kept."""
    kept = Counter(re.sub(r"\.\d+\.", ".*.", name.removesuffix(".weight")) for name in fp8.kept)
    names = ", ".join(name if count == 1 else f"{name} ({count})" for name, count in kept.items())
    scales = "power-of-two" if fp8.power_of_two_scales else "float32"
    return (
        f"weight sync in FP8: {len(fp8.quantized)} of {len(fp8.quantized) + len(fp8.kept)} linear layers, with "
        f"{scales} scales; {len(fp8.kept)} kept: {names}"
    )


def _linear_layers(model: Any) -> dict[str, int | None]:
    """Return the block of each linear layer, by its name in a checkpoint, without ``.weight``.

    It is ``None`` for the output layer, for routers and gates, and for what computes decays.
    """
    config, weights, found = model.config.get_text_config(), hf_weights(model), dict[str, int | None]()
    num_blocks = config.num_hidden_layers
    stacks = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == num_blocks]
    for name, module in model.named_modules():
        owner, _, own_name = name.rpartition(".")
        weight, parent = f"{name}.weight", model.get_submodule(owner)
        is_gate = own_name != EXPERTS and bool(owner) and hasattr(parent, EXPERTS)
        if own_name == EXPERTS:
            sent = list(_matrices_of_experts(name, module, weights))
        elif weight in weights and (is_gate or isinstance(module, nn.Linear)):
            sent = [weights[weight][0].name]
        else:
            sent = [weight] if isinstance(module, nn.Linear) else []  # a tied weight is sent under another name
        is_kept = is_gate or (isinstance(module, nn.Linear) and module in _decay_layers(parent, config.hidden_size))
        stack = None if is_kept else next((stack for stack in stacks if name.startswith(f"{stack}.")), None)
        block = int(name.removeprefix(f"{stack}.").partition(".")[0]) if stack is not None else None
        found |= dict.fromkeys((layer.removesuffix(".weight") for layer in sent), block)
    return found


def _decay_layers(owner: nn.Module, hidden: int) -> list[nn.Linear]:
    """Return the narrow layers of one with a state, for decays and gates; in Mamba 2 they are part of what it reads."""
    has_decays = any(module._parameters.keys() & {*DECAYS} for module in owner.modules())
    layers = [each for each in owner.children() if isinstance(each, nn.Linear) and has_decays]
    narrow = [each for each in layers if 8 * min(each.weight.shape) <= hidden]
    return narrow or [each for each in layers if each.in_features == hidden]


def _matrices_of_experts(name: str, experts: nn.Module, weights: Mapping[str, Sequence[HFWeight]]) -> Iterator[str]:
    for own_name, parameter in experts.named_parameters(prefix=name, recurse=False):
        for weight in weights[own_name] if parameter.dim() > 2 else ():
            if len(weight.shape) > 2:
                raise ConfigError(
                    f"model.weight_sync.dtype fp8_block cannot take {own_name} {list(parameter.shape)}: "
                    "checkpoints of this model have all experts in one tensor, and engines know no FP8 blocks of it. "
                    "Set it to null."
                )
            yield weight.name


@torch.no_grad()
def check_finite(
    model: nn.Module, dtype: torch.dtype, fp8: FP8Weights, weights: WeightsOfParameters | None = None
) -> None:
    """Raise an error if a weight to be sent in FP8 is NaN or infinite, which would spoil the scale of its whole block.

    Collective: every rank reads its own shards, and all raise alike. Nothing was sent, so an engine that holds weights
    keeps them, and their version.

    Args:
        model: The policy.
        dtype: Dtype of the policy, to which weights are rounded first.
        fp8: The weights that are sent in FP8.
        weights: Checkpoint weights that each parameter becomes; by default those of a transformers model.

    Raises:
        RunError: The message names the first such weight, and counts the others.
    """
    in_fp8, checkpoint_weights = frozenset(fp8.quantized), hf_weights(model) if weights is None else weights
    quantized = {
        name: parameter
        for name, parameter in model.named_parameters()
        if any(weight.name in in_fp8 for weight in checkpoint_weights[name])
    }
    adapters = adapters_of(model)
    for name, update in ({} if adapters is None else adapters.updates).items():
        if name in quantized:  # what is sent is their sum
            quantized |= {f"the adapter of {name} ({part})": getattr(update, part).weight for part in ("down", "up")}
    extremes = []
    for parameter in quantized.values():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
        extremes.append((torch.stack(local.aminmax()) if local.numel() else local.new_zeros(2)).float())
    is_bad = (~torch.stack(extremes).to(dtype).isfinite()).any(dim=1).int()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(is_bad, dist.ReduceOp.MAX)
    bad = [name for name, flag in zip(quantized, is_bad.tolist(), strict=True) if flag]
    if bad:
        others = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise RunError(
            f"Weight sync aborted before sending: {bad[0]}{others} contains NaN or inf, which FP8 cannot represent. "
            "The last optimizer step diverged; see model.limits.on_nonfinite."
        )
