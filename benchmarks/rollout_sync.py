"""Other ways to move weights, with which the rollout benchmark compares the sync of an engine."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from rlplug.interfaces import PolicySpec, RolloutEngine
from rlplug.weight_sync.buckets import weight_buckets
from rlplug.weight_sync.fp8_layers import check_finite


def other_ways(
    engine: RolloutEngine, policy: nn.Module, spec: PolicySpec, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the seconds of each repeat: the bytes alone, the buckets alone, and with vLLM two ways into its model."""
    size, device = dist.get_world_size(), next(policy.parameters()).device
    num_elements = sum(parameter.numel() for parameter in policy.parameters())
    share = torch.empty(min(num_elements, 1 << 29) // size, dtype=spec.dtype, device=device)
    full = torch.empty(share.numel() * size, dtype=spec.dtype, device=device)

    def floor() -> None:
        for _ in range(-(-num_elements // full.numel())):
            dist.all_gather_into_tensor(full, share) if size > 1 else full.copy_(share)

    def gather_alone() -> None:
        for _ in weight_buckets(policy, spec.dtype, arguments.bucket_mib << 20, spec.fp8):
            pass

    def check_alone() -> None:
        assert spec.fp8 is not None
        check_finite(policy, spec.dtype, spec.fp8)

    ways: dict[str, Callable[[], None]] = {
        "floor, the bytes once": floor,
        "buckets without an engine": gather_alone,
    }
    if spec.fp8 is not None:
        ways["a look for NaN and infinity"] = check_alone
    elif arguments.engine == "vllm":
        ways |= ways_into_vllm(engine, policy, spec, arguments)
    return {name: seconds_of(way, arguments.repeats, device) for name, way in ways.items()}


def ways_into_vllm(
    engine: Any, policy: nn.Module, spec: PolicySpec, arguments: argparse.Namespace
) -> dict[str, Callable[[], None]]:
    """Return a call for each parameter, and vLLM's layer-wise reload."""
    from rlplug_rollout_vllm import weights as vllm_weights

    def one_call_each() -> None:
        for name, parameter in policy.named_parameters():
            full = parameter.full_tensor().to(spec.dtype)  # type: ignore[attr-defined]
            engine._engine.apply_model(functools.partial(load_one, name, full))

    def layerwise() -> None:
        buckets = weight_buckets(policy, spec.dtype, arguments.bucket_mib << 20)
        with mock.patch.object(vllm_weights, "PLAIN_METHODS", frozenset()):  # so that no weight counts as plain
            vllm_weights.load_weights(engine._model, engine._engine.vllm_config, buckets)

    if next(policy.parameters()).device.type == "cpu":  # weights are re-packed there, and only the reload unpacks them
        return {"vLLM's layer-wise reload": layerwise}
    return {"a call for each parameter": one_call_each, "vLLM's layer-wise reload": layerwise}


def load_one(name: str, tensor: torch.Tensor, model: Any) -> None:
    """Load a single weight."""
    with torch.no_grad():
        model.load_weights(iter([(name, tensor)]))


def seconds_of(way: Callable[[], None], repeats: int, device: torch.device) -> list[float]:
    """Return the seconds of each repeat, after one that is not counted, until the device is done."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        way()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def described(seconds: list[float]) -> dict[str, Any]:
    """Return what is written of them."""
    return {"median": statistics.median(seconds), "all": [round(value, 4) for value in seconds]}
