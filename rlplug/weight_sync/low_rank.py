"""Low-rank adapters of a network: the record that the weight sync, the export and the reference policy read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlplug.distributed.mesh import local_part, local_slices
from rlplug.weight_sync.rounding import round_to_bfloat16


@dataclass(frozen=True)
class LowRankUpdate:
    """The update ``scale * up @ down`` of a matrix [O, I]; LoRA, arXiv:2106.09685, equation 3."""

    down: nn.Linear
    """Layer with A of the paper, float32 [r, I], sharded or not."""
    up: nn.Linear
    """Layer with B of the paper, float32 [O, r], sharded as the matrix is."""
    scale: float
    """alpha / r."""

    def added_to(self, weight: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the matrix with its update, added in float32, in ``dtype``: each rank computes its own rows.

        In bfloat16 the sum is rounded as :func:`rlplug.weight_sync.rounding.round_to_bfloat16` says.

        Args:
            weight: The matrix [O, I], sharded or not; unchanged.
            down: All of A, on the matrix's device.
            dtype: Dtype of the result.
        """
        rows, up = local_part(weight), local_part(self.up.weight)
        merged = torch.addmm(rows.float(), up.float(), down.float(), alpha=self.scale)
        if dtype == torch.bfloat16:
            merged = round_to_bfloat16(merged, local_slices(weight)[0].start * weight.shape[1])
        else:
            merged = merged.to(dtype)
        if not isinstance(weight, DTensor):
            return merged
        return DTensor.from_local(
            merged, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )


@dataclass(frozen=True)
class Adapters:
    """The adapters of a network whose other parameters are frozen."""

    updates: Mapping[str, LowRankUpdate]
    """Each adapted matrix's update, by the matrix's name in the network."""
    plain_names: Mapping[str, str]
    """The name that each frozen parameter has in the same network without adapters, by its name with them."""


def adapters_of(network: nn.Module) -> Adapters | None:
    """Return the adapters of a network, or ``None`` where all of it trains."""
    adapters: Adapters | None = vars(network).get("rlplug_adapters")
    return adapters


def attach_adapters(network: nn.Module, adapters: Adapters) -> None:
    """Record the adapters of ``network``."""
    vars(network)["rlplug_adapters"] = adapters
