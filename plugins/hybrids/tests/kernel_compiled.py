"""A rank that trains a hybrid policy, compiled and not, as torchrun starts it: ``python kernel_compiled.py FOLDER``.

``FOLDER`` has a model's configuration; ``results.json`` there gets gradients, the layouts of those that convolutions
get, how many graphs torch.compile made and why it broke them, each by the optimizations. Stand-ins are to the compiler
what the kernels are: causal-conv1d's are operations that write into what they get, and it skips fla's.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import kernel_stand_ins
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv1d_input, conv1d_weight

in_torch = kernel_stand_ins.causal_conv1d_fn
LAYOUTS: set[str] = set()


@torch.library.custom_op("stand_in::forward", mutates_args={"out"})
def forward(x: Tensor, weight: Tensor, seq_idx: Tensor, out: Tensor) -> None:
    out.copy_(in_torch(x, weight, None, seq_idx, activation="silu"))


@torch.library.custom_op("stand_in::backward", mutates_args={"dx", "dweight"})
def backward(x: Tensor, weight: Tensor, seq_idx: Tensor, dout: Tensor, dx: Tensor, dweight: Tensor) -> None:
    LAYOUTS.add("rows of tokens" if dout.stride(1) == 1 else "rows of channels")
    width, filters = weight.shape[-1], weight[:, None]
    edges = [*sorted(kernel_stand_ins.starts(x.shape[-1], seq_idx)), x.shape[-1]]
    for a, b in pairwise(edges):  # an operation's own gradient is not that of autograd
        padded = functional.pad(x[..., a:b], (width - 1, 0))
        convolved = functional.conv1d(padded, filters, groups=len(weight))
        gate = convolved.sigmoid()
        change = dout[..., a:b] * gate * (1 + convolved * (1 - gate))
        dx[..., a:b] = conv1d_input(padded.shape, filters, change, groups=len(weight))[..., width - 1 :]
        dweight += conv1d_weight(padded, filters.shape, change, groups=len(weight))[:, 0]


class Convolution(torch.autograd.Function):
    """As causal-conv1d writes it: what its gradient does depends on strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seq_idx: Tensor) -> Tensor:
        out = torch.empty_like(x)
        forward(x, weight, seq_idx, out)
        ctx.save_for_backward(x, weight, seq_idx)
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        (dout,) = douts
        if dout.stride(2) != 1 and dout.stride(1) != 1:
            dout = dout.contiguous()
        x, weight, seq_idx = ctx.saved_tensors
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        backward(x, weight, seq_idx, dout, dx, dweight)
        return dx, dweight, None


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
    activation=None,
):  # fmt: skip
    return Convolution.apply(x, weight, seq_idx)


kernel_stand_ins.causal_conv1d_fn = causal_conv1d_fn
kernel_stand_ins.chunk_gated_delta_rule = torch.compiler.disable(kernel_stand_ins.chunk_gated_delta_rule)
kernel_stand_ins.install()

from family_ranks import make_strategy
from family_trials import packed_logprobs, rows_for
from rlplug_hybrids import HybridTrainer, trainer
from rlplug_optims import CompileBlocks, GradientCheckpointing, SelectiveCheckpointing

from rlplug.interfaces import ModelConfig
from rlplug.models.build import build_policy


def report_of(optimizations: list[Any], folder: Path, strategy: Any) -> dict[str, Any]:
    config = ModelConfig(str(folder), init="random", dtype="float32")
    policy, _ = build_policy(config, optimizations, strategy, HybridTrainer())
    strategy.set_last_micro_batch(policy, is_last=True)
    LAYOUTS.clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    packed_logprobs(policy, rows_for(policy, 1)).sum().backward()
    grads = {name: each.grad.full_tensor().tolist() for name, each in policy.named_parameters()}
    breaks = sorted({reason.partition("\n")[0] for reason in torch._dynamo.utils.counters["graph_break"]})
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"layouts": sorted(LAYOUTS), "graphs": graphs, "breaks": breaks, "gradients": grads}


def main(folder: Path) -> None:
    trainer.compute_in_torch = trainer.trace_convolutions  # what a trainer calls on a GPU
    strategy, eager = make_strategy(), {"backend": "aot_eager"}
    chosen: dict[str, list[Any]] = {
        "none": [],
        "GradientCheckpointing": [GradientCheckpointing()],
        "SelectiveCheckpointing": [SelectiveCheckpointing()],
        "CompileBlocks": [CompileBlocks(**eager)],
        "both": [GradientCheckpointing(), CompileBlocks(**eager)],
    }
    results = {name: report_of(each, folder, strategy) for name, each in chosen.items()}
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
