"""Optimizations of a draw that the kit did not know, one mistake each, and two correct ones of unusual style."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from broken_optimizations import MLP, SDPA, Fine
from broken_passes import ChangedPass
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.interfaces import Effect, Optimization
from rlplug.interfaces.memory import ActivationTraits

__all__ = ["ChunksMLPs", "PacksWhatIsSaved"]


class RecomputesReentrantly(Fine):
    """torch's older checkpoint gives no gradient where a block's input has none, as with adapters."""

    def wrapped(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        def through(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(functools.partial(forward, **kwargs), hidden, *args, use_reentrant=True)

        return through


class UnfreezesEverything(Fine):
    """As it prepares models for training elsewhere."""

    def after_shard(self, model: nn.Module) -> None:
        model.requires_grad_()


class MarksModules(Fine):
    """With a flag that no forward method reads, and counts the flags."""

    def before_shard(self, model: nn.Module) -> None:
        self.blocks = [module for module in model.modules() if isinstance(module, nn.Linear)]
        for each in self.blocks:
            marked: Any = each
            marked.uses_fast_kernel = True

    def effects(self) -> list[Effect]:
        return [Effect(f"fast kernels in {len(self.blocks)} linear layers")] if self.blocks else []


class PlansAnew(Fine):
    """As if there were no trainer and no other optimization."""

    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        return ActivationTraits()


class RecomputesHalf(Fine):
    """Every second block, and plans that all are."""

    def wrapped(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        if index % 2:
            return forward
        return lambda hidden, *args, **kwargs: checkpoint(forward, hidden, *args, use_reentrant=False, **kwargs)

    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        return dataclasses.replace(traits, recompute="all")


class WatchesAllModules(Fine):
    """By a hook of the whole process, which every model of it has."""

    def before_shard(self, model: nn.Module) -> None:
        super().before_shard(model)
        nn.modules.module.register_module_forward_hook(lambda module, args, output: None)


class ClampsHiddenStates(ChangedPass):
    def changed(self, hidden: Tensor, index: int) -> Tensor:
        return hidden.clamp(-1000.0, 1000.0)


class ReadsTheHead(Fine):
    """A critic has none, and it applies to one."""

    def before_shard(self, model: nn.Module) -> None:
        super().before_shard(model)
        parts: Any = model
        parts.lm_head.forward = self.wrapped(parts.lm_head.forward, 0)


class NormsInModelDtype(Fine):
    def before_shard(self, model: nn.Module) -> None:
        super().before_shard(model)
        for norm in model.modules():
            if hasattr(norm, "variance_epsilon"):
                norm.forward = functools.partial(self.normed, norm)  # type: ignore[assignment]

    def normed(self, norm: Any, hidden: Tensor) -> Tensor:
        scaled: Tensor = norm.weight * hidden * torch.rsqrt(hidden.square().mean(-1, True) + norm.variance_epsilon)
        return scaled


class RotatesFarPositions(Fine):
    """Rotary embeddings of a table that is too short."""

    def wrapped(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        def through(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            cosines, sines = kwargs["position_embeddings"]
            if int(kwargs["position_ids"].max()) >= 256:
                kwargs["position_embeddings"] = cosines.roll(1, dims=1), sines.roll(1, dims=1)
            return forward(hidden, *args, **kwargs)

        return through


class RegistersOverSdpa(Fine):
    """An attention function of its own under a name that models without it have in their configuration."""

    def before_shard(self, model: nn.Module) -> None:
        super().before_shard(model)
        ALL_ATTENTION_FUNCTIONS["sdpa"] = self.wrapped(SDPA, 0)


class ReplacesAnEqual(Fine):
    """Puts a function that does the same into the library's class."""

    def before_shard(self, model: nn.Module) -> None:
        super().before_shard(model)
        LlamaMLP.forward = lambda mlp, hidden: MLP(mlp, hidden)


# ---- correct ones -------------------------------------------------------------------------------------------------


class PacksWhatIsSaved(Optimization):
    """What MLPs save goes through two functions, as in an offload; attributes come with the first edit."""

    model: nn.Module
    count = 0

    def before_shard(self, model: nn.Module) -> None:
        self.model, self.count = model, 0
        for block in transformer_blocks(model):
            parts: Any = block
            parts.mlp.forward = self.packed(parts.mlp.forward)
            self.count += 1

    @staticmethod
    def packed(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def through(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), lambda box: box[0]):
                return forward(*args, **kwargs)

        return through

    def effects(self) -> list[Effect]:
        return [Effect(f"packs what {self.count} MLPs save")] if self.count else []


@dataclasses.dataclass(eq=False)
class ChunksMLPs(Optimization):
    """Tokens of MLPs in chunks, the last and shorter one included."""

    size: int = 16
    count: int = 0

    def before_shard(self, model: nn.Module) -> None:
        self.count = 0
        for block in transformer_blocks(model):
            parts: Any = block
            parts.mlp.forward = functools.partial(self.chunked, parts.mlp.forward)
            self.count += 1

    def chunked(self, forward: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        return torch.cat([forward(part) for part in hidden.split(self.size, dim=1)], dim=1)

    def effects(self) -> list[Effect]:
        return [Effect(f"{self.count} MLPs in chunks of {self.size} tokens")] if self.count else []


class ForgetsFarGradients(ChangedPass):
    """Cuts the gradient of what comes late in rows that are long."""

    def changed(self, hidden: Tensor, index: int) -> Tensor:
        near, far = hidden.split([min(100, hidden.shape[-2]), max(0, hidden.shape[-2] - 100)], dim=-2)
        return torch.cat([near, far.detach()], dim=-2)
