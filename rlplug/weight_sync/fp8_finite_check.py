"""Check for NaN and infinite weights before a weight sync in FP8."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlplug.errors import RunError
from rlplug.interfaces.weight_sync import FP8Weights, WeightsOfParameters
from rlplug.weight_sync.hf_names import adapters_of, hf_weights


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
