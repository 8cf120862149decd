"""Entry point of rlplug-optims: registers its optimisations."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry
from rlplug_optims.activation_offload import ActivationOffload
from rlplug_optims.compile_blocks import CompileBlocks
from rlplug_optims.entropy_memory import EntropyCheckpointing, EntropyChunking
from rlplug_optims.flash_attention import FlashAttention4
from rlplug_optims.fused_logprobs import FusedLogprobs
from rlplug_optims.gradient_checkpointing import GradientCheckpointing
from rlplug_optims.liger import Liger
from rlplug_optims.prefetch import BackwardPrefetch, ForwardPrefetch
from rlplug_optims.selective_checkpointing import SelectiveCheckpointing

RLPLUG_API_VERSION = ">=2,<3"

OPTIMIZATIONS = (
    ActivationOffload,
    BackwardPrefetch,
    CompileBlocks,
    EntropyCheckpointing,
    EntropyChunking,
    FlashAttention4,
    ForwardPrefetch,
    FusedLogprobs,
    GradientCheckpointing,
    Liger,
    SelectiveCheckpointing,
)


@hookimpl
def rlplug_register_optimizations(registry: Registry) -> None:
    for optimization in OPTIMIZATIONS:
        registry.add("optimizations", optimization)
