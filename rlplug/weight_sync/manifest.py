"""Manifest of a weight sync: names, shapes and dtypes of the tensors that it sends."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rlplug.interfaces.rollout import PolicySpec
from rlplug.interfaces.weight_sync import FP8Weights, TensorInfo
from rlplug.types import GIB
from rlplug.weight_sync.hf_names import hf_weights, sent_dtype


def policy_weights(policy: PolicySpec) -> dict[str, TensorInfo]:
    """Return shape and dtype of each tensor that a sync of the policy sends, by checkpoint name."""
    return expected_tensors(meta_model(policy.path), policy)


def adapters_line(policy: PolicySpec, engine: str) -> str:
    """Return a line on what weight syncs send to an engine that serves the policy's adapters."""
    assert policy.adapters is not None
    weights = policy_weights(policy)
    adapters, whole = (
        sum(tensor.num_bytes for tensor in tensors.values()) for tensors in (policy.adapters.tensors(weights), weights)
    )
    return (
        f"adapters only: {adapters / (1 << 20):.3g} MiB a sync instead of {whole / GIB:.3g} GiB, served by {engine}; "
        "the first sync after a start brings the frozen weights too"
    )


def meta_model(path: str) -> Any:
    """Return the transformers model of a folder or Hub name on the meta device, without memory for its weights."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def expected_tensors(model: nn.Module, policy: PolicySpec) -> dict[str, TensorInfo]:
    """Return shape and dtype of each tensor that a sync of ``model`` sends; a weight in FP8 has two."""
    in_fp8 = frozenset(policy.fp8.quantized) if policy.fp8 is not None else frozenset()
    weights: dict[str, TensorInfo] = {}
    for weight in chain.from_iterable(hf_weights(model).values()):
        name, shape = weight.name, weight.shape
        weights[name] = TensorInfo(shape, FP8Weights.DTYPE if name in in_fp8 else sent_dtype(name, policy.dtype))
        if name in in_fp8:
            weights[FP8Weights.scale_name(name)] = TensorInfo(FP8Weights.scale_shape(shape), torch.float32)
    return weights
