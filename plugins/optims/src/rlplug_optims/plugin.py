"""The entry point: what this distribution registers. The classes are imported when a run names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplug.plugin_manager import hookimpl

if TYPE_CHECKING:
    from rlplug.config import RunConfig
    from rlplug.registry import Registry
    from rlplug.training.row_layout import RowLayout

RLPLUG_API_VERSION = ">=3.2,<4"


@hookimpl
def rlplug_register_optimizations(registry: Registry) -> None:
    for place in (
        "rlplug_optims.activation_offload:ActivationOffload",
        "rlplug_optims.prefetch:BackwardPrefetch",
        "rlplug_optims.compile_blocks:CompileBlocks",
        "rlplug_optims.entropy_memory:EntropyCheckpointing",
        "rlplug_optims.entropy_memory:EntropyChunking",
        "rlplug_optims.flash_attention:FlashAttention4",
        "rlplug_optims.prefetch:ForwardPrefetch",
        "rlplug_optims.fused_logprobs:FusedLogprobs",
        "rlplug_optims.gradient_checkpointing:GradientCheckpointing",
        "rlplug_optims.liger:Liger",
        "rlplug_optims.selective_checkpointing:SelectiveCheckpointing",
    ):
        registry.add("optimizations", place)


@hookimpl
def rlplug_register_classes(registry: Registry) -> None:
    for place in (
        "rlplug_optims.compile_cache:CompileCache",
        "rlplug_optims.muon:Muon",
        "rlplug_optims.state_offload:StateOffload",
    ):
        registry.add("classes", place)


@hookimpl
def rlplug_make_row_layout(config: RunConfig, on_gpu: bool) -> RowLayout | None:
    from rlplug_optims.shared_prefixes.decision import decide

    return decide(config, on_gpu)
