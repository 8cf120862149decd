"""Checks that an engine can load a policy's FP8 weights: it needs whole blocks where it fuses or shards layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rlplug.errors import ConfigError
from rlplug.interfaces.rollout import PolicySpec
from rlplug.interfaces.weight_sync import FP8Weights, TensorInfo
from rlplug.weight_sync.manifest import policy_weights

FUSED: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Layers that vLLM, SGLang and TensorRT-LLM fuse into one matrix, by their rows."""

CUT_BY_COLUMNS: Final = ("o_proj", "down_proj", "w2")
"""Layers whose columns tensor parallelism shards; it shards the rows of fused layers."""

EXPERT: Final = re.compile(r"(?<=\.experts\.)\d+\..+$")
"""Part of a layer's name that differs among the experts of a block."""


def check_fp8_fits(engine: str, policy: PolicySpec, tensor_parallel_size: int = 1) -> None:
    """Raise an error for weights that an engine cannot load in FP8.

    Args:
        engine: Name of the engine, for the message.
        policy: The policy; without ``fp8`` there is nothing to check.
        tensor_parallel_size: Number of GPUs that share the model.

    Raises:
        ConfigError: The message names the first such weight, counts the others, and says what to set.
    """
    if policy.fp8 is None:
        return
    split = frozenset(EXPERT.sub("", name) for name in policy.fp8.kept if EXPERT.search(name))
    layers = _Layers(policy_weights(policy), frozenset(policy.fp8.quantized), split, tensor_parallel_size)
    problems = [(name, reason) for name in policy.fp8.quantized if (reason := layers.problem(name))]
    if problems:
        (name, reason), more = problems[0], len(problems) - 1
        module = "experts" if EXPERT.search(name) else name.split(".")[-3]
        others = f" {more} more do not fit either." if more else ""
        raise ConfigError(
            f"{engine} cannot take {name} {list(layers.weights[name].shape)} in FP8: {reason}.{others} Send such "
            f"layers in {str(policy.dtype).removeprefix('torch.')}: model.weight_sync.keep takes patterns of their "
            f'names, such as "*.{module}.*".'
        )


@dataclass(frozen=True)
class _Layers:
    """Weights of a policy as an engine fuses and shards them."""

    weights: Mapping[str, TensorInfo]
    """Shape and dtype of each weight as it is sent, by name."""
    quantized: frozenset[str]
    """Names of the weights in FP8."""
    split: frozenset[str]
    """Names, without the expert's number, of expert layers that are kept for some experts."""
    size: int
    """Number of GPUs that share the model."""

    def problem(self, name: str) -> str | None:
        """Return why the engine cannot load a weight in FP8, or ``None`` if it can."""
        module, _, layer = name.removesuffix(".weight").rpartition(".")
        block, shared = FP8Weights.BLOCK, f" over {self.size} GPUs" if self.size > 1 else ""
        rows, columns = self.weights[name].shape
        if EXPERT.sub("", name) in self.split:
            return "all experts of a block are one layer, and not all of them are sent in FP8"
        for parts in FUSED:
            siblings = [f"{module}.{part}.weight" for part in parts if f"{module}.{part}.weight" in self.weights]
            if layer not in parts or len(siblings) < 2:
                continue
            others = " and ".join(part for part in parts if part != layer)
            if not self.quantized.issuperset(siblings):
                return f"it is one matrix with {others}, of which not all are sent in FP8"
            if rows % (block * self.size):
                return f"it is one matrix with {others}, and {rows} rows are no whole blocks of {block}{shared}"
        if columns % block:
            return f"{columns} columns are no whole blocks of {block}, in which activations are rounded"
        if layer in CUT_BY_COLUMNS and columns % (block * self.size):
            return f"{columns} columns are no whole blocks of {block}{shared}"
        return None
