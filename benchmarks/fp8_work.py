"""Measurements of the FP8 benchmark beside rollouts: the mismatch of logprobs, and the speed of rounding weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlplug.types import Completion, Request
from rlplug.weight_sync.fp8_quantize import quantize_blocks
from rlplug.weight_sync.fp8_quantize import quantize_by_torch as by_torch


@torch.no_grad()
def mismatch(policy: nn.Module, requests: Sequence[Request], completions: Sequence[Completion]) -> dict[str, float]:
    """Return the absolute difference of the engine's logprobs and the trainer's, in nats; temperature 1.

    Args:
        policy: Computes in bfloat16.
        requests: Those of the completions.
        completions: Each with its logprobs.
    """
    device, found = next(policy.parameters()).device, []
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]], device=device)
        logits: Tensor = policy(ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
        logprobs = logits.log_softmax(dim=-1).gather(-1, ids[0, len(request.prompt_ids) :, None])[:, 0]
        found.append((logprobs.cpu() - torch.tensor(completion.logprobs)).abs())
    differences = torch.cat(found)
    return {
        "mean": float(differences.mean()),
        "p99": float(differences.quantile(0.99)),
        "max": float(differences.max()),
        "tokens": len(differences),
    }


def rounding_speeds(shape: tuple[int, int], device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Return how fast a float32 and a bfloat16 weight are rounded, beside a copy of the same bytes.

    GB/s are of the bytes that have to move: the weight is read, and values of one byte each are written.
    """
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(shape, device=device).to(dtype)
        num_bytes = weight.nbytes + weight.numel()
        other = torch.empty(num_bytes // 2, dtype=torch.uint8, device=device)
        compiled: Any = torch.compile(by_torch, dynamic=True)
        ways: dict[str, Callable[[], Any]] = {
            "copy": lambda other=other: other.clone(),
            "torch": lambda weight=weight: by_torch(weight, torch.bfloat16),
            "torch.compile": lambda weight=weight, compiled=compiled: compiled(weight, torch.bfloat16),
        }
        if device.type == "cuda":
            ways["kernel"] = lambda weight=weight: quantize_blocks(weight, torch.bfloat16)
        for name, way in ways.items():
            seconds = _median_seconds(way, device, repeats)
            rows.append({"way": name, "dtype": str(dtype), "ms": seconds * 1e3, "gb_per_s": num_bytes / seconds / 1e9})
    return rows


def _median_seconds(way: Callable[[], Any], device: torch.device, repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        way()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])
