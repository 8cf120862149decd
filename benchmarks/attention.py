"""Times attention of packed rows, forward and backward, with each of the kernels that rlplug can use on a GPU.

    python benchmarks/attention.py --out OUT

FlashAttention-2 is torch's variable-length kernel, cuDNN's is used for one long sequence alone, FlashAttention-4 comes
with ``FlashAttention4`` of rlplug-optims where flash-attn-4 is installed. Operations are those of causal attention:
``2 n^2 H head_dim`` for a sequence of n tokens, forward, and 2.5 times as many backward (the scores once more). Times
are medians of ``triton.testing.do_bench`` on random values. ``differs`` is from FlashAttention-2's, in the 2-norm, of
the worst of output and gradients. ``--sinks`` times attention with sinks, as of gpt-oss, which no kernel of torch has:
its products are all in memory, and ``differs`` is from float32's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from rlplug_optims.flash_attention import flash_attention_4
from torch import Tensor

from rlplug.models.attention import packed_attention
from rlplug.models.attention.kernels import cudnn_attention, torch_flash_attention
from rlplug.models.attention.sequences import Sequences

HEADS: Final = {
    "llama-1.7b": (32, 32, 64),
    "qwen3-1.7b": (16, 8, 128),
    "qwen3-8b": (32, 8, 128),
    "gpt-oss-20b": (64, 8, 64),
}
"""Heads of queries, of keys and values, and their size."""
ROWS: Final = {
    "21 x 768": [768] * 21,
    "4 x 2,048": [2048] * 4,
    "8 x 2,048": [2048] * 8,
    "2 x 8,192": [8192] * 2,
    "1 x 16,384": [16384],
}
"""Lengths of the sequences of a row."""
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def kernels_for(sequences: Sequences) -> dict[str, Kernel]:
    """Return each kernel that can compute a row of ``sequences``, the one that others are compared with first."""
    if sequences.sinks is not None:
        return {
            "products, float32": lambda *states: attention_with_sinks(*(each.float() for each in states), sequences),
            "products": lambda *states: attention_with_sinks(*states, sequences),
        }
    found: dict[str, Kernel] = {
        "FlashAttention-2": lambda *states: torch_flash_attention(*states, sequences),
        "FlashAttention-4": lambda *states: flash_attention_4(*states, sequences),
    }
    if len(sequences.borders) == 2:
        found["cuDNN"] = lambda *states: cudnn_attention(*states, sequences.scale)
    return found


def attention_with_sinks(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Return what a run computes for a model with sinks, [N, H, head_dim]."""
    assert sequences.sinks is not None
    output, _ = packed_attention(
        torch.nn.Module(),
        *(states.transpose(0, 1)[None] for states in (query, key, value)),
        None,
        cu_seq_lens_q=sequences.borders,
        max_length_q=sequences.longest,
        s_aux=sequences.sinks.to(query.dtype),
    )
    return output[0]


def measure(shape: str, lengths: list[int], has_sinks: bool) -> list[dict[str, Any]]:
    """Return a line for each kernel."""
    from triton.testing import do_bench

    heads, shared, size = HEADS[shape]
    total = sum(lengths)
    borders = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)
    states = [
        torch.randn(total, num, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for num in (heads, shared, shared)
    ]
    d_output = torch.randn(total, heads, size, device="cuda", dtype=torch.bfloat16)
    flops, rows, reference = 2 * heads * size * sum(n**2 for n in lengths), [], None
    sinks = torch.randn(heads, device="cuda") if has_sinks else None
    for name, attend in kernels_for(Sequences(borders, max(lengths), sinks=sinks)).items():
        torch.cuda.reset_peak_memory_stats()
        try:
            output = attend(*states)
            d_output = d_output.to(output.dtype)
            results = [output.detach(), *torch.autograd.grad(output, states, d_output, retain_graph=True)]
        except Exception as problem:  # noqa: BLE001 - of a compiler: the others are measured
            rows.append({"kernel": name, "error": f"{type(problem).__name__}: {str(problem)[:300]}"})
            continue
        reference = reference or results
        forward = do_bench(lambda: attend(*states), return_mode="median")  # noqa: B023 - called here
        backward = do_bench(
            lambda: torch.autograd.grad(output, states, d_output, retain_graph=True),  # noqa: B023
            return_mode="median",
        )
        rows.append(
            {
                "kernel": name,
                "forward ms": round(forward, 3),
                "backward ms": round(backward, 3),
                "forward TFLOP/s": round(flops / forward / 1e9),
                "backward TFLOP/s": round(2.5 * flops / backward / 1e9),
                "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 1),
                "differs": round(max(map(difference, results, reference)), 4),
            }
        )
    return rows


def difference(result: Tensor, reference: Tensor) -> float:
    """Return how far ``result`` is from ``reference``, relative to that."""
    return float((result.float() - reference.float()).norm() / reference.float().norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--sinks", action="store_true", help="time attention with sinks")
    parser.add_argument("--out", type=Path, help="folder for attention.jsonl")
    options = parser.parse_args()
    for shape in options.shapes:
        for name in options.rows:
            for row in measure(shape, ROWS[name], options.sinks):
                line = json.dumps({"shape": shape, "row": name, **row})
                print(line, flush=True)
                if options.out is not None:
                    options.out.mkdir(parents=True, exist_ok=True)
                    with (options.out / "attention.jsonl").open("a") as file:
                        file.write(line + "\n")


if __name__ == "__main__":
    main()
