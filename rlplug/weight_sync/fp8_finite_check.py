"""Weights that FP8 cannot hold are found before any of a sync is sent."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlplug.errors import RunError
from rlplug.interfaces.weight_sync import FP8Weights
from rlplug.weight_sync.hf_names import hf_weights


@torch.no_grad()
def check_finite(model: nn.Module, dtype: torch.dtype, fp8: FP8Weights) -> None:
    """Stop the run if a weight that travels in FP8 is NaN or infinite: it would spoil its whole block.

    Collective: every rank reads its own shards, and all raise alike. Nothing was sent, so an engine that holds weights
    keeps them, and their version.

    Args:
        model: The policy.
        dtype: In which its weights would travel otherwise.
        fp8: Which travel in FP8.

    Raises:
        RunError: It names the weights.
    """
    in_fp8, checkpoint_weights = frozenset(fp8.quantized), hf_weights(model)
    weights = {
        name: parameter
        for name, parameter in model.named_parameters()
        if any(weight.name in in_fp8 for weight in checkpoint_weights[name])
    }
    extremes = []
    for parameter in weights.values():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
        extremes.append(torch.stack(local.aminmax()) if local.numel() else local.new_zeros(2))
    is_bad = (~torch.stack(extremes).to(dtype).isfinite()).any(dim=1).int()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(is_bad, dist.ReduceOp.MAX)
    bad = [name for name, flag in zip(weights, is_bad.tolist(), strict=True) if flag]
    if bad:
        others = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise RunError(
            f"{bad[0]}{others} has NaN or infinite values, which FP8 cannot hold: no weight of this sync was sent. The "
            "update before it has gone wrong; model.limits.on_nonfinite says what happens there."
        )
