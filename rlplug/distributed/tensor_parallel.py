"""Tensor parallelism: splits each matrix of a block over ranks, by the plan that transformers has for the model.

Embeddings, the output layer and the norms of the hidden states stay whole on every rank of the tensor axis.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rlplug.distributed.fsdp_units import pretrained_part
from rlplug.errors import ConfigError

KEY: Final = "trainer.strategy.init_args.tensor"
STYLES: Final[dict[str, ParallelStyle]] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    # norms of queries and keys, [B, T, heads, head_dim]: a rank has some heads; the weight's gradient sums over all
    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
}
"""Torch's parallel styles, by transformers' names."""
SPLIT_SIZES: Final = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes of a model's configuration that the tensor axis must divide."""


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the blocks of the Hugging Face model in ``model``, if there is one, over the one-axis ``mesh``, in place.

    Raises:
        ConfigError: Transformers has no plan for this model, or one with an unknown style, or the ranks do not divide
            the heads or the MLP width of a block.
    """
    inner = pretrained_part(model)
    if inner is None:
        return
    base: Any = inner.base_model
    plan = _plan(base, mesh.size())
    parallelize_module(base, mesh, {pattern: STYLES[style] for pattern, style in plan.items()})


def _plan(base: Any, size: int) -> dict[str, str]:
    """Return transformers' plan for the modules of blocks: the style of each name pattern."""
    name, config = type(base).__name__, base.config
    plan: dict[str, str] | None = config.base_model_tp_plan
    if not plan:
        raise ConfigError(f"{KEY} is {size}, and transformers has no tensor-parallel plan for {name}: set it to 1.")
    in_blocks = {pattern: style for pattern, style in plan.items() if "*" in pattern}
    for pattern, style in in_blocks.items():
        if style not in STYLES:
            raise ConfigError(
                f"{KEY} is {size}, and {name} splits {pattern} as {style!r}, which is not supported: set it to 1."
            )
    for option in SPLIT_SIZES:
        if getattr(config, option) % size:
            raise ConfigError(
                f"{KEY} is {size}, which does not divide {option}, {getattr(config, option)} in {name}: give a divisor."
            )
    return in_blocks
