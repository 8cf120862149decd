"""FlashAttention-4's kernels in the attention of packed rows."""

from __future__ import annotations

import functools
import importlib
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from rlplug.distributed.fsdp_units import pretrained_part, transformer_blocks
from rlplug.errors import ConfigError
from rlplug.interfaces import Effect, Optimization
from rlplug.models.attention import NAME as PACKED
from rlplug.models.attention import packed_attention
from rlplug.models.attention.kernels import torch_flash_attention
from rlplug.models.attention.sequences import FlashAttention, Sequences
from rlplug_optims.shared_prefixes.decision import head_size, option

NAME: Final = "packed_fa4"
"""Of this attention, among those of transformers."""
INSTALL: Final = "pip install rlplug-optims[flash-attention]"
REMOVE: Final = "remove FlashAttention4 from model.optimizations"
LENGTHS: Final = (200, 1, 311)
"""Of the sequences that are compared: neither alike nor multiples of a tile."""
TOLERANCE: Final = 0.02
"""Largest relative difference from torch's kernels, in the 2-norm: each rounds to half precision where it likes."""


class FlashAttention4(Optimization):
    """Compute attention with FlashAttention-4, in place of FlashAttention-2, which torch brings.

    Saves: time in attention, forward and backward.
    Costs: seconds at the start, to compile its kernels. Needs a Hopper or Blackwell GPU, passes in half precision, and
    ``pip install rlplug-optims[flash-attention]``.
    Proof: the layers whose attention it computes, after outputs and gradients for the model's heads were compared with
    those of torch's kernels.

    FlashAttention-4 continues Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
    Low-precision", arXiv:2407.08608, in Python (the CuTe DSL). The model's other attention kernels are not used beside
    it: what it cannot compute stops the run.
    """

    def __init__(self) -> None:
        self._blocks: list[nn.Module] = []

    def before_shard(self, model: nn.Module) -> None:
        if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10):
            raise ConfigError(f"FlashAttention4 needs a Hopper or Blackwell GPU, and this machine has none: {REMOVE}.")
        trunk: Any = pretrained_part(model)
        used = None if trunk is None else trunk.config._attn_implementation
        if used != PACKED:
            what = "the model is none of transformers" if trunk is None else f"attn_implementation is {used!r}"
            raise ConfigError(f"FlashAttention4 replaces kernels of rlplug's packed attention, and {what}: {REMOVE}.")
        try:
            _kernels()
        except (ImportError, AttributeError, OSError) as error:
            raise ConfigError(f"FlashAttention-4 cannot be imported ({error}): {INSTALL}, or {REMOVE}.") from error
        try:
            _compare_with_torch(trunk.config.get_text_config())
        except ConfigError:
            raise
        except Exception as error:  # of a compiler, which says much of itself and little of the model
            what = f"{type(error).__name__}: {error}"[:400]
            raise ConfigError(
                f"FlashAttention-4 does not compute attention of this model's heads ({what}): {INSTALL}, or {REMOVE}."
            ) from error
        trunk.set_attn_implementation(NAME)
        self._blocks = transformer_blocks(model)

    def effects(self) -> list[Effect]:
        layers = [module for block in self._blocks for module in block.modules() if _uses(module)]
        return [Effect(f"FlashAttention-4 computes attention of {len(layers)} layers")] if layers else []


def flash_attention_4(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Return causal attention [N, H, head_dim] within sequences, in half precision on a GPU.

    Args:
        query: [N, H, head_dim].
        key: [N, H_kv, head_dim]; H is a multiple of H_kv.
        value: [N, H_kv, head_dim].
        sequences: Borders of the sequences in the row, scale and window.
    """
    output: Tensor
    output, _ = _forward(
        query, key, value, sequences.borders, sequences.longest, sequences.scale, sequences.window or 0
    )
    return output


def _uses(module: nn.Module) -> bool:
    return hasattr(module, "is_causal") and getattr(module.config, "_attn_implementation", None) == NAME


def _compare_with_torch(config: Any) -> None:
    """Compute attention and its gradients in both ways, for random values of a text model's heads.

    Raises:
        ConfigError: They differ.
    """
    heads = option(config, "num_attention_heads")
    shared = option(config, "num_key_value_heads") or heads
    size = head_size(config)
    generator = torch.Generator(device="cuda").manual_seed(0)
    *inputs, d_output = (
        torch.randn(sum(LENGTHS), count, size, device="cuda", dtype=torch.bfloat16, generator=generator)
        for count in (heads, shared, shared, heads)
    )
    borders = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0, dtype=torch.int32)

    @torch.enable_grad()
    def results(attend: FlashAttention) -> list[Tensor]:
        query, key, value = leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        output = attend(query, key, value, Sequences(borders, max(LENGTHS)))
        return [output.detach(), *torch.autograd.grad(output, leaves, d_output)]

    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    for name, result, expected in zip(names, results(flash_attention_4), results(torch_flash_attention), strict=True):
        difference = float((result.float() - expected.float()).norm() / expected.float().norm())
        if not difference < TOLERANCE:
            raise ConfigError(
                f"FlashAttention-4's {name} differs from that of torch's kernels by {difference:.3g} for this model's "
                f"heads: {REMOVE}, or install another version of flash-attn-4."
            )


@functools.cache
def _kernels() -> Any:
    """Return the module with FlashAttention-4's two passes; torch's own integration calls the same functions."""
    module = importlib.import_module("flash_attn.cute.interface")
    _ = module._flash_attn_fwd, module._flash_attn_bwd
    return module


def _arguments(borders: Tensor, longest: int, scale: float | None, window: int) -> dict[str, Any]:
    return {
        "softmax_scale": scale,
        "causal": not window,
        "window_size_left": window - 1 if window else None,
        "window_size_right": 0 if window else None,
        "cu_seqlens_q": borders,
        "cu_seqlens_k": borders,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


@torch.library.custom_op("rlplug_optims::flash_attention_4", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, scale: float | None, window: int
) -> tuple[Tensor, Tensor]:
    """Return the output and ``logsumexp`` [H, N] of the scores; a ``window`` of 0 is none."""
    arguments = _arguments(borders, longest, scale, window)
    results = _kernels()._flash_attn_fwd(query, key, value, return_lse=True, **arguments)
    return results[0], results[1]  # newer versions return more


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    return query.new_empty(*query.shape[:2], value.shape[-1]), lse


@torch.library.custom_op("rlplug_optims::flash_attention_4_backward", mutates_args=())
def _backward(
    d_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    borders: Tensor,
    longest: int,
    scale: float | None,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (query, key, value))
    arguments = _arguments(borders, longest, scale, window) | {"dq": dq, "dk": dk, "dv": dv}
    _kernels()._flash_attn_bwd(query, key, value, output, d_output.contiguous(), lse, **arguments)
    return dq, dk, dv


@_backward.register_fake
def _(_d_output: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, d_output: Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, borders, output, lse = ctx.saved_tensors
    gradients = _backward(d_output, query, key, value, output, lse, borders, ctx.longest, ctx.scale, ctx.window)
    return *gradients, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)
OPERATOR: Final = torch.ops.rlplug_optims.flash_attention_4.default
"""The forward pass, as graphs and checkpointing know it."""

AttentionInterface.register(NAME, functools.partial(packed_attention, flash=flash_attention_4))
