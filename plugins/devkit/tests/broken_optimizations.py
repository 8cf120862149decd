"""Optimizations with one mistake each, which ``test_optimization_sabotage.py`` runs through their kit."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from ranks import run_ranks
from rlplug_devkit import OptimizationConformance
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.distributed.mesh import local_part
from rlplug.errors import ConfigError
from rlplug.interfaces import Effect, Optimization
from rlplug.interfaces.memory import ActivationTraits

NORM, MLP, SDPA = LlamaRMSNorm.forward, LlamaMLP.forward, ALL_ATTENTION_FUNCTIONS["sdpa"]


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


# ---- claims, and what others see ----------------------------------------------------------------------------------


class AppliesToNobody(Fine):
    applies_to = ("actor",)  # type: ignore[assignment]


class ConflictsWithoutAReason(Fine):
    conflicts = MappingProxyType({"CompileBlocks": ""})


class PlansByItsCalls(Fine):
    chunk = 1

    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        self.chunk += 1
        return replace(traits, logits_chunk=self.chunk)


class SavesNothingIfNeeded(Fine):
    only_if_needed = True


class ClaimsWithoutAnEdit(Fine):
    """Counts the blocks that it would have wrapped."""

    def before_shard(self, model: nn.Module) -> None:
        self.blocks = transformer_blocks(model)


class ReportsItsRank(Fine):
    def effects(self) -> list[Effect]:
        return [Effect(f"wrapped {len(self.blocks) - dist.get_rank()} blocks")] if self.blocks else []


class FreezesTheEmbeddings(Fine):
    def before_shard(self, model: nn.Module) -> None:
        super().before_shard(model)
        parts: Any = model
        parts.model.embed_tokens.weight.requires_grad_(False)


class LeavesEvaluationMode(Fine):
    """A mode in which some blocks compute otherwise, and no checkpointing happens."""

    def after_shard(self, model: nn.Module) -> None:
        model.eval()


class ChangesTheNorm(Fine):
    """Base of those that multiply the last norm's output by a ratio of weights, which is 1 at first."""

    def after_shard(self, model: nn.Module) -> None:
        parts: Any = model
        norm = parts.model.norm
        forward = norm.forward
        norm.forward = lambda hidden: forward(hidden) * self.ratio(norm)

    def ratio(self, norm: Any) -> Tensor:
        raise NotImplementedError


class SharesAStaleCache(ChangesTheNorm):
    """The first weights that any model had."""

    first: ClassVar[dict[int, Tensor]] = {}

    def ratio(self, norm: Any) -> Tensor:
        weight = norm.weight.detach()
        return self.first.setdefault(len(weight), weight.clone()) / weight


class SharesTheLastModel(ChangesTheNorm):
    """A class attribute, which the next model's object overwrites."""

    last: ClassVar[Any] = None

    def after_shard(self, model: nn.Module) -> None:
        super().after_shard(model)
        parts: Any = model
        type(self).last = parts.model.norm

    def ratio(self, norm: Any) -> Tensor:
        return local_part(self.last.weight).detach() / norm.weight.detach()


class ChangesTheConfiguration(Fine):
    def before_shard(self, model: nn.Module) -> None:
        super().before_shard(model)
        parts: Any = model
        parts.config.made_by = "an optimization"


class NormalisesGradients(Fine):
    """Divides a gradient by its largest entry, and multiplies again: 0 / 0 where nothing trains."""

    def wrapped(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        def through(*args: Any, **kwargs: Any) -> Any:
            found = forward(*args, **kwargs)
            if found.requires_grad:
                found.register_hook(lambda gradient: gradient / gradient.abs().max() * gradient.abs().max())
            return found

        return through


class ScalesInEvaluation(Fine):
    """A reference is in evaluation mode."""

    def before_shard(self, model: nn.Module) -> None:
        self.blocks = transformer_blocks(model)
        for block in self.blocks:
            block.forward = self.scaled(block, block.forward)

    def scaled(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: forward(*args, **kwargs) * (1.0 if block.training else 1.01)


class WritesIntoTheModelsFolder(Fine):
    applies_to = ("policy", "reference")  # a critic has its configuration elsewhere

    def after_shard(self, model: nn.Module) -> None:
        parts: Any = model
        (Path(parts.config.name_or_path) / "made.json").write_text("{}")


class DrawsInAPass(Fine):
    def wrapped(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        def through(*args: Any, **kwargs: Any) -> Any:
            torch.rand(1)
            return forward(*args, **kwargs)

        return through


class SetsAVariableInAPass(Fine):
    def wrapped(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        def through(*args: Any, **kwargs: Any) -> Any:
            os.environ["MADE_BY_A_TEST"] = "1"
            return forward(*args, **kwargs)

        return through


# ---- what the kit does not catch ----------------------------------------------------------------------------------


class SavesNothing(Fine):
    """Has an effect, and neither time nor memory is less: the kit measures neither."""


class OptimizationTests(OptimizationConformance):
    models = ("llama",)
    meshes: ClassVar[Sequence[str]] = ("1 rank",)

    def run_ranks(self, command: list[str], world_size: int) -> None:
        run_ranks(command, world_size)

    @classmethod
    def teardown_class(cls) -> None:
        """Undo what mistakes left in the process, which is that of all tests."""
        super().teardown_class()
        LlamaRMSNorm.forward = NORM
        LlamaMLP.forward = MLP
        ALL_ATTENTION_FUNCTIONS["sdpa"] = SDPA
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        os.environ.pop("MADE_BY_A_TEST", None)
