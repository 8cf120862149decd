"""TorchTitan's compilation: every block with ``torch.compile``, without graph breaks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn

from rlplug_trainer_titan.library import titan

RECOMPILE_LIMIT: Final = 32
"""Variants of a block's code: policy and reference, with and without gradients, of one length and of any."""


def compile_blocks(decoder: Any, backend: str) -> None:
    """Compile every block of TorchTitan's ``decoder`` when it first runs, and for any length when another one comes.

    A block that cannot be compiled whole, or is recompiled more often than ``RECOMPILE_LIMIT``, stops the run.

    Args:
        decoder: The model, its blocks checkpointed already. It may be split later: nothing is traced yet.
        backend: Backend of ``torch.compile``.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    sizes = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), 1)
    no_parallelism = titan("distributed").ParallelDims(**sizes, world_size=1, spmd_backend="partial_dtensor")
    config = titan("config").CompileConfig(enable=True, backend=backend)
    titan("distributed.compile").apply_compile(decoder, compile_config=config, parallel_dims=no_parallelism)


def num_compiled(blocks: Iterable[nn.Module]) -> int:
    """Return how many of ``blocks`` run compiled."""
    return sum(block._compiled_call_impl is not None for block in blocks)
