"""What engines cannot take in FP8: rows and columns that are no whole blocks where they fuse, cut or calculate."""

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
"""Layers that become one matrix, rows below rows, in vLLM, SGLang and TensorRT-LLM."""

CUT_BY_COLUMNS: Final = ("o_proj", "down_proj", "w2")
"""Layers whose columns tensor parallelism distributes; of the fused ones it distributes rows."""

EXPERT: Final = re.compile(r"(?<=\.experts\.)\d+\..+$")
"""What tells the layers of a block's experts apart."""


def check_fp8_fits(engine: str, policy: PolicySpec, tensor_parallel_size: int = 1) -> None:
    """Refuse weights that an engine cannot take in FP8, by name.

    Args:
        engine: Its name, for the message.
        policy: With ``fp8``, or there is nothing to check.
        tensor_parallel_size: GPUs that share the model.

    Raises:
        ConfigError: The message names the first, says how many more there are, and what to set.
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
            f"{engine} cannot take {name} {list(layers.weights[name].shape)} in FP8: {reason}.{others} Let such layers "
            f"travel in {str(policy.dtype).removeprefix('torch.')}: model.weight_sync.keep has patterns of their "
            f'names, such as "*.{module}.*".'
        )


@dataclass(frozen=True)
class _Layers:
    weights: Mapping[str, TensorInfo]
    quantized: frozenset[str]
    split: frozenset[str]
    """Blocks' experts of which some are kept."""
    size: int
    """GPUs that share the model."""

    def problem(self, name: str) -> str | None:
        """Return why a weight cannot be taken, if so."""
        module, _, layer = name.removesuffix(".weight").rpartition(".")
        block, shared = FP8Weights.BLOCK, f" over {self.size} GPUs" if self.size > 1 else ""
        rows, columns = self.weights[name].shape
        if EXPERT.sub("", name) in self.split:
            return "all experts of a block are one layer, and not all of them travel in FP8"
        for parts in FUSED:
            siblings = [f"{module}.{part}.weight" for part in parts if f"{module}.{part}.weight" in self.weights]
            if layer not in parts or len(siblings) < 2:
                continue
            others = " and ".join(part for part in parts if part != layer)
            if not self.quantized.issuperset(siblings):
                return f"it is one matrix with {others}, of which not all travel in FP8"
            if rows % (block * self.size):
                return f"it is one matrix with {others}, and {rows} rows are no whole blocks of {block}{shared}"
        if columns % block:
            return f"{columns} columns are no whole blocks of {block}, in which activations are rounded"
        if layer in CUT_BY_COLUMNS and columns % (block * self.size):
            return f"{columns} columns are no whole blocks of {block}{shared}"
        return None
