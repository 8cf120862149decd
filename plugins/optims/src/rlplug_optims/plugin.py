"""The entry point: what this distribution registers. The classes are imported when a run names them."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry

RLPLUG_API_VERSION = ">=3,<4"


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
    registry.add("classes", "rlplug_optims.muon:Muon")
