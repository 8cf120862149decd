"""``RLFSDP2Strategy``: Lightning's model-parallel strategy with what RL adds to it.

On one process or many, on CPU (gloo) or GPU (NCCL), it is the same code path: parameters are FSDP2 shards over one
data-parallel axis. Upstream's strategy leaves sharding, gradient synchronisation and mixed-mesh clipping to the
module, so they live here, beside the mesh.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

Item = TypeVar("Item")


class RLFSDP2Strategy(ModelParallelStrategy):
    """FSDP2 over all processes.

    Args:
        reshard_after_forward: Free a block's gathered parameters after its forward pass and gather them again for
            the backward pass: less memory, more communication.
        timeout_s: Deadline of every collective; past it the run stops rather than hang.
        process_group_backend: ``nccl`` or ``gloo``; by default what fits the accelerator.
    """

    def __init__(
        self,
        reshard_after_forward: bool = True,
        timeout_s: float = 1800.0,
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_s),
        )
        self.reshard_after_forward = reshard_after_forward

    def setup_environment(self) -> None:
        # upstream's "auto" means the number of nodes, not of processes
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def shard(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Shard ``model`` in place, one FSDP unit per transformer block and one for the rest.

        Passes run in ``dtype``; shards, optimizer and gradient reduction stay float32. Gradients are *summed* over
        ranks, because losses are divided by global denominators.
        """
        options: dict[str, Any] = {
            "mesh": self.device_mesh["data_parallel"],
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        }
        for block in transformer_blocks(model):
            fully_shard(block, **options)
        fully_shard(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # or a factor becomes PREMUL_SUM, which gloo lacks

    def set_gradient_sync(self, model: nn.Module, enabled: bool) -> None:
        """Reduce gradients over ranks in the backward passes to come, or only accumulate them on this rank."""
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(enabled)

    @torch.no_grad()
    def clip_grad_norm(self, model: nn.Module, max_norm: float | None) -> float:
        """Scale gradients to a global norm of at most ``max_norm`` and return the norm before scaling."""
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if max_norm is not None and torch.isfinite(norm):
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return float(norm)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what a checkpoint keeps, and leave an optimizer that has not stepped as it is.

        To learn the layout, torch's ``get_optimizer_state_dict`` lets a fresh one step with zero gradients, and Adam
        would count that step.
        """
        is_fresh = not optimizer.state
        state = super().optimizer_state(optimizer)
        if is_fresh:
            optimizer.state.clear()
        return state

    def gather(self, items: list[Item]) -> list[Item]:
        """Return the concatenation of every rank's ``items``, in rank order, on every rank."""
        if self.world_size == 1:
            return items
        gathered: list[list[Item]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(gathered, items)
        return [item for part in gathered for item in part]

    def any_rank(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on some rank."""
        return any(self.gather([flag]))


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a Hugging Face model: the items of its longest module list."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])
