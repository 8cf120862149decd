"""What compilers do with kernels of layers with a state: Triton, which tunes them, and torch.compile around them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import nn

from rlplug_hybrids.layers import kernels_of


@cache
def compile_side_by_side() -> bool:
    """Have Triton's tuner compile all candidates of a kernel at once, before it times the first.

    fla's kernels have tens of candidates each, and Triton compiles one after another.

    Returns:
        Whether it will. It won't without Triton, or with one whose tuner has another form.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner

        time_one, _ = Autotuner._bench, Autotuner.prune_configs
    except (ImportError, AttributeError):
        return False
    executor = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="triton-compile")

    def bench(self: Any, *args: Any, config: Any, **options: Any) -> Any:
        candidates = self.prune_configs(options)
        if config == candidates[0]:
            with AsyncCompileMode(executor, ignore_errors=True):  # what does not compile fails again when it is timed
                for each in candidates:
                    self.fn.run(*args, **options | each.all_kwargs() | {"warmup": True})
        return time_one(self, *args, config=config, **options)

    Autotuner._bench = bench
    return True


def trace_convolutions(layers: Iterable[nn.Module]) -> None:
    """Let torch.compile take the kernel of a convolution as one operation.

    Its gradient depends on strides, which Dynamo does not know: it would copy the gradient into rows of channels,
    [1, D, N], which the kernel copies back, and products with an odd N are several times as slow in that layout.
    """
    for layer_class in {type(layer) for layer in layers}:
        for kernel in kernels_of(layer_class):
            if kernel.package == "causal_conv1d" and kernel.is_used:
                torch.compiler.allow_in_graph(kernel.cells["implementation"].cell_contents)  # type: ignore[no-untyped-call]
