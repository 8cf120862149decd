"""Optimisations of the update, each with proof that it took effect, and the Muon optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplug.late_names import late_names

if TYPE_CHECKING:
    from rlplug_optims.activation_offload import ActivationOffload
    from rlplug_optims.compile_blocks import CompileBlocks
    from rlplug_optims.entropy_memory import EntropyCheckpointing, EntropyChunking
    from rlplug_optims.flash_attention import FlashAttention4
    from rlplug_optims.fused_logprobs import FusedLogprobs
    from rlplug_optims.gradient_checkpointing import GradientCheckpointing
    from rlplug_optims.liger import Liger
    from rlplug_optims.muon import Muon
    from rlplug_optims.prefetch import BackwardPrefetch, ForwardPrefetch
    from rlplug_optims.selective_checkpointing import SelectiveCheckpointing

__all__ = [
    "ActivationOffload",
    "BackwardPrefetch",
    "CompileBlocks",
    "EntropyCheckpointing",
    "EntropyChunking",
    "FlashAttention4",
    "ForwardPrefetch",
    "FusedLogprobs",
    "GradientCheckpointing",
    "Liger",
    "Muon",
    "SelectiveCheckpointing",
]

__getattr__ = late_names(
    __name__,
    {
        "ActivationOffload": "activation_offload",
        "BackwardPrefetch": "prefetch",
        "CompileBlocks": "compile_blocks",
        "EntropyCheckpointing": "entropy_memory",
        "EntropyChunking": "entropy_memory",
        "FlashAttention4": "flash_attention",
        "ForwardPrefetch": "prefetch",
        "FusedLogprobs": "fused_logprobs",
        "GradientCheckpointing": "gradient_checkpointing",
        "Liger": "liger",
        "Muon": "muon",
        "SelectiveCheckpointing": "selective_checkpointing",
    },
)
