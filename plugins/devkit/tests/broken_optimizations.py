"""Optimizations with one mistake each, which ``test_optimization_sabotage.py`` runs through their kit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from ranks import run_ranks
from rlplug_devkit import OptimizationConformance
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.distributed.mesh import local_part
from rlplug.errors import ConfigError
from rlplug.interfaces import Effect, Optimization

NORM = LlamaRMSNorm.forward


class Fine(Optimization):
    """Calls a block's own forward method through another function."""

    def __init__(self) -> None:
        self.blocks: list[nn.Module] = []

    def before_shard(self, model: nn.Module) -> None:
        self.blocks = transformer_blocks(model)
        for index, block in enumerate(self.blocks):
            block.forward = self.wrapped(block.forward, index)

    def wrapped(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        def through(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        return through

    def effects(self) -> list[Effect]:
        return [Effect(f"wrapped {len(self.blocks)} blocks")] if self.blocks else []


class HoldsALock(Fine):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class AlwaysClaims(Fine):
    def effects(self) -> list[Effect]:
        return [Effect("wrapped all blocks")]


class RefusesEverything(Fine):
    def before_shard(self, model: nn.Module) -> None:
        raise ConfigError("not on this host")


class ClaimsNothing(Fine):
    def before_shard(self, model: nn.Module) -> None:
        pass


class SaysNothing(Fine):
    def effects(self) -> list[Effect]:
        return [Effect(" ")] if self.blocks else []


class SetsDeterministicAlgorithms(Fine):
    def before_shard(self, model: nn.Module) -> None:
        super().before_shard(model)
        torch.use_deterministic_algorithms(True, warn_only=True)


class DrawsGlobally(Fine):
    def after_shard(self, model: nn.Module) -> None:
        torch.rand(1)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class RenamesParameters(Fine):
    """An MLP within another module: its parameters have other names."""

    def before_shard(self, model: nn.Module) -> None:
        super().before_shard(model)
        block: Any = self.blocks[0]
        block.mlp = Wrapper(block.mlp)


class TiesTwoWeights(Fine):
    def before_shard(self, model: nn.Module) -> None:
        super().before_shard(model)
        block: Any = self.blocks[0]
        block.mlp.up_proj.weight = block.mlp.gate_proj.weight


class ScalesHiddenStates(Fine):
    def wrapped(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        return lambda *args, **kwargs: forward(*args, **kwargs) * 1.001


class LeaksBetweenRows(Fine):
    """Right for a single sequence alone."""

    def wrapped(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        def through(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            found = forward(hidden, *args, **kwargs)
            is_single = hidden.shape[1] <= 12
            return found if is_single else found + 0.01 * found.mean(dim=1, keepdim=True)

        return through


class DetachesABlock(Fine):
    def wrapped(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        def through(*args: Any, **kwargs: Any) -> Any:
            found = forward(*args, **kwargs)
            return found.detach() + 0 * found if index == 1 and torch.is_grad_enabled() else found

        return through


class KeepsTheFirstBatch(Fine):
    """Remembers a gradient's scale from the first backward pass."""

    def wrapped(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        calls: list[int] = []

        def through(*args: Any, **kwargs: Any) -> Any:
            found = forward(*args, **kwargs)
            if torch.is_grad_enabled():
                calls.append(1)
                if len(calls) > 1:
                    found.register_hook(lambda gradient: gradient * 1.01)
            return found

        return through


class CountsTrainingPasses(Fine):
    """Base of those that do something in one training pass: the fourth is that of a step, the fifth of a resume.

    Passes are those of the first block; ``gradients`` has one, and ``split`` two.
    """

    def wrapped(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        calls: list[int] = []

        def through(*args: Any, **kwargs: Any) -> Any:
            calls.append(1) if torch.is_grad_enabled() else None
            return self.changed(forward(*args, **kwargs), len(calls) if index == 0 else 0)

        return through

    def changed(self, hidden: Tensor, number: int) -> Tensor:
        raise NotImplementedError


class WritesIntoAWeight(CountsTrainingPasses):
    def after_shard(self, model: nn.Module) -> None:
        parts: Any = model
        self.weight = parts.model.norm.weight

    def changed(self, hidden: Tensor, number: int) -> Tensor:
        if number == 4 and torch.is_grad_enabled():
            local_part(self.weight).mul_(0.99)
        return hidden


class ForgetsItsPasses(CountsTrainingPasses):
    """From the fifth pass on gradients are larger, and a resume begins to count anew."""

    def changed(self, hidden: Tensor, number: int) -> Tensor:
        if number >= 5 and hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 1.1)
        return hidden


class ChecksOnlyPlainBlocks(Fine):
    """Takes the block's class's method, and so undoes what was there before."""

    def after_shard(self, model: nn.Module) -> None:
        for block in self.blocks:
            if "recomputing" in block.forward.__qualname__:
                block.forward = lambda hidden, *args, **kwargs: hidden * 1.01


class PatchesTheLibrary(Fine):
    """Replaces a method of transformers' class instead of the model's."""

    def before_shard(self, model: nn.Module) -> None:
        super().before_shard(model)
        LlamaRMSNorm.forward = lambda self, hidden: NORM(self, hidden) * (1.0 if "_made" in self.__dict__ else 1.01)
        for module in model.modules():
            module.__dict__["_made"] = True


# ---- what the kit does not catch ----------------------------------------------------------------------------------


class SavesNothing(Fine):
    """Has an effect, and neither time nor memory is less: the kit measures neither."""


class DiffersInBFloat16(Fine):
    """The kit computes in float32."""

    def wrapped(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        def through(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            found = forward(hidden, *args, **kwargs)
            return found * 1.1 if found.dtype == torch.bfloat16 else found

        return through


class OptimizationTests(OptimizationConformance):
    models = ("llama",)
    meshes: ClassVar[Sequence[str]] = ("1 rank",)
    optimization: ClassVar[type[Optimization]]

    def make_optimizations(self) -> Mapping[str, Sequence[Optimization]]:
        return {"it": [self.optimization()]}

    def run_ranks(self, command: list[str], world_size: int) -> None:
        run_ranks(command, world_size)

    @classmethod
    def teardown_class(cls) -> None:
        """Undo what mistakes left in the process, which is that of all tests."""
        super().teardown_class()
        LlamaRMSNorm.forward = NORM
        torch.use_deterministic_algorithms(False)
