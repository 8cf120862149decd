"""Optimizations that go wrong late: after a step, in a second model, in a long row, or by what they keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from broken_optimizations import Fine
from torch import Tensor, nn

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.distributed.mesh import local_part
from rlplug.interfaces import Effect
from rlplug.interfaces.memory import ActivationTraits
from rlplug.models.lm_head import LMHead, LMHeadOutput, LogprobRequest, TokenLogprobs, lm_head_of


class ChangedPass(Fine):
    """Base of those that change what a block returns."""

    def wrapped(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        def through(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            return self.changed(forward(hidden, *args, **kwargs), index)

        return through

    def changed(self, hidden: Tensor, index: int) -> Tensor:
        raise NotImplementedError


class KeepsHiddenStates(ChangedPass):
    """A list that nobody reads, and that grows by each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def changed(self, hidden: Tensor, index: int) -> Tensor:
        self.kept.append(hidden.detach().clone())
        return hidden


class KeepsGraphs(ChangedPass):
    """The last pass's graph, with all its activations, until the next one."""

    last: Tensor | None = None

    def changed(self, hidden: Tensor, index: int) -> Tensor:
        self.last = hidden
        return hidden


class CutsLongRows(ChangedPass):
    """Chunks of 64 tokens, of which the last is left out where it is not full."""

    def changed(self, hidden: Tensor, index: int) -> Tensor:
        size = hidden.shape[1]
        if size <= 64 or size % 64 == 0:
            return hidden
        whole = size - size % 64
        return torch.cat([hidden[:, :whole], hidden[:, whole:] * 0.9], 1)


class StaleInEvaluation(Fine):
    """Keeps a copy of a weight for passes without gradients, and never renews it."""

    def after_shard(self, model: nn.Module) -> None:
        parts: Any = model
        norm = parts.model.norm
        forward, kept = norm.forward, []

        def through(hidden: Tensor) -> Any:
            found = forward(hidden)
            if torch.is_grad_enabled():
                return found
            if not kept:
                kept.append(local_part(norm.weight).detach().clone())
            return found * (kept[0] / local_part(norm.weight).detach()) if kept[0].shape == norm.weight.shape else found

        norm.forward = through


class WorksOnce(Fine):
    """Edits the first model of the process alone, and claims it of each."""

    is_done: ClassVar[bool] = False

    def before_shard(self, model: nn.Module) -> None:
        if WorksOnce.is_done:
            self.blocks = transformer_blocks(model)
        else:
            super().before_shard(model)
        WorksOnce.is_done = True


class RotatesByLength(Fine):
    """Keeps the rotations of a number of tokens, whichever rows begin where."""

    def before_shard(self, model: nn.Module) -> None:
        super().before_shard(model)
        parts: Any = model
        rotary = parts.model.rotary_emb
        forward, known = rotary.forward, {}

        def through(hidden: Tensor, position_ids: Tensor) -> Any:
            key = (position_ids.shape, hidden.dtype)
            if key not in known:
                known[key] = forward(hidden, position_ids)
            return known[key]

        rotary.forward = through


class ClipsLargeGradients(ChangedPass):
    def changed(self, hidden: Tensor, index: int) -> Tensor:
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.clamp(-10, 10))
        return hidden


class SavesWithoutGradients(Fine):
    """Enables gradients within a pass that has none, and lets go of the graph."""

    def wrapped(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        def through(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                return forward(*args, **kwargs)
            with torch.enable_grad():
                return forward(*args, **kwargs).detach()

        return through


class CountsAllModels(Fine):
    """In a list of the class."""

    every: ClassVar[list[nn.Module]] = []

    def before_shard(self, model: nn.Module) -> None:
        super().before_shard(model)
        self.every.extend(self.blocks)

    def effects(self) -> list[Effect]:
        return [Effect(f"wrapped {len(self.every)} blocks")] if self.blocks else []


class IsItsOwnCopy(Fine):
    def __deepcopy__(self, memo: Any) -> IsItsOwnCopy:
        return self


class CountsWhatItSkips(Fine):
    """Leaves the last block as it is."""

    def before_shard(self, model: nn.Module) -> None:
        self.blocks = transformer_blocks(model)
        for index, block in enumerate(self.blocks[:-1]):
            block.forward = self.wrapped(block.forward, index)


class AddsHooks(ChangedPass):
    """One more hook on each pass, none of which is removed."""

    def changed(self, hidden: Tensor, index: int) -> Tensor:
        self.blocks[index].register_forward_hook(lambda *_: None)
        return hidden


class TruncatesProducts(ChangedPass):
    def changed(self, hidden: Tensor, index: int) -> Tensor:
        torch.set_float32_matmul_precision("medium")
        return hidden


class ScalesOnOtherRanks(ChangedPass):
    """Gradients of all ranks but the first."""

    def changed(self, hidden: Tensor, index: int) -> Tensor:
        if dist.get_rank() and hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 1.01)
        return hidden


class SavesOnPaper(Fine):
    """Its plan says that the backward pass computes blocks again, and nothing does."""

    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        return replace(traits, recompute="all")


class RoundsInBFloat16(ChangedPass):
    """Quantises hidden states of bfloat16 models to a few bits."""

    def changed(self, hidden: Tensor, index: int) -> Tensor:
        if hidden.dtype != torch.bfloat16:
            return hidden
        return hidden + ((hidden * 2).round() / 2 - hidden).detach()


class DetachesWithoutARow(ChangedPass):
    """Skips the gradients of micro-batches of a single row."""

    def changed(self, hidden: Tensor, index: int) -> Tensor:
        return hidden.detach() if hidden.shape[1] < 10 else hidden


class DiffersInBFloat16(ChangedPass):
    def changed(self, hidden: Tensor, index: int) -> Tensor:
        return hidden * 1.1 if hidden.dtype == torch.bfloat16 else hidden


class ChangedHead(Fine):
    """Base of those that change how logprobs and entropies come from logits."""

    def after_shard(self, model: nn.Module) -> None:
        head = lm_head_of(model)
        vars(head)["from_logits"] = self.changed(head.from_logits)

    def changed(self, function: Callable[..., LMHeadOutput]) -> Callable[..., LMHeadOutput]:
        raise NotImplementedError


class ForgetsTopP(ChangedHead):
    """Has the logprobs of the whole distribution for those of the truncated one."""

    def changed(self, function: Callable[..., LMHeadOutput]) -> Callable[..., LMHeadOutput]:
        def through(logits: Tensor, request: LogprobRequest) -> LMHeadOutput:
            output = function(logits, request)
            logprobs = output.tokens.logprobs
            return replace(output, tokens=TokenLogprobs(logprobs, logprobs.detach()))

        return through


class RoundsTheSoftmax(ChangedHead):
    """Has logprobs in the dtype of the pass, which in bfloat16 have three digits."""

    def changed(self, function: Callable[..., LMHeadOutput]) -> Callable[..., LMHeadOutput]:
        def through(logits: Tensor, request: LogprobRequest) -> LMHeadOutput:
            output = function(logits, request)
            rounded = [
                each.to(logits.dtype).float() for each in (output.tokens.logprobs, output.tokens.sampled_logprobs)
            ]
            return replace(output, tokens=TokenLogprobs(*rounded))

        return through


class WrapsTheClass(Fine):
    """Calls the forward method of a block's class, and not that of an optimization before it."""

    def before_shard(self, model: nn.Module) -> None:
        self.blocks = transformer_blocks(model)
        for index, block in enumerate(self.blocks):
            block.forward = self.wrapped(type(block).forward.__get__(block), index)


class NormsAsLlama(Fine):
    """Fuses the norms of all models, by the formula of Llama's: Gemma's add 1 to the weight."""

    def before_shard(self, model: nn.Module) -> None:
        self.blocks = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
        for norm in self.blocks:
            norm.forward = partial(_norm_of_llama, norm)


def _norm_of_llama(norm: Any, hidden: Tensor) -> Tensor:
    states = hidden.float()
    states = states * (states.square().mean(-1, keepdim=True) + getattr(norm, "eps", 1e-6)).rsqrt()
    return norm.weight * states.to(hidden.dtype)  # type: ignore[no-any-return]


class LeavesOutTheBias(Fine):
    """Takes the place of an output layer, and knows its weight alone."""

    def after_shard(self, model: nn.Module) -> None:
        def fused(hidden: Tensor, weight: Tensor, bias: Tensor | None, request: LogprobRequest) -> LMHeadOutput:
            return LMHead().from_logits(nn.functional.linear(hidden, weight), request)

        lm_head_of(model).fused = fused


class TrainsMeasuredEntropies(ChangedHead):
    def changed(self, function: Callable[..., LMHeadOutput]) -> Callable[..., LMHeadOutput]:
        def through(logits: Tensor, request: LogprobRequest) -> LMHeadOutput:
            is_measured = request.entropy_mode == "value"
            return function(logits, replace(request, entropy_mode="gradient") if is_measured else request)

        return through
