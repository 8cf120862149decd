"""What engines that fuse layers cannot take in FP8: blocks of 128 rows must not straddle two parts of one matrix."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from rlplug.errors import ConfigError
from rlplug.interfaces.rollout import PolicySpec
from rlplug.interfaces.weight_sync import FP8Weights, TensorInfo
from rlplug.rollout.shapes import policy_weights

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
    weights = policy_weights(policy)
    problems = list(_problems(policy.fp8, weights, tensor_parallel_size))
    if problems:
        (name, reason), more = problems[0], len(problems) - 1
        others = f" {more} more do not fit either." if more else ""
        raise ConfigError(
            f"{engine} cannot take {name} {list(weights[name].shape)} in FP8: {reason}.{others} Let such layers travel "
            f"in {str(policy.dtype).removeprefix('torch.')}: model.weight_sync.keep has patterns of their names, such "
            f'as "*.{name.split(".")[-3]}.*".'
        )


def _problems(fp8: FP8Weights, weights: Mapping[str, TensorInfo], size: int) -> Iterator[tuple[str, str]]:
    quantized, block = frozenset(fp8.quantized), fp8.BLOCK
    shared = f" over {size} GPUs" if size > 1 else ""
    split = {EXPERT.sub("", name) for name in fp8.kept if EXPERT.search(name)}
    for name in fp8.quantized:
        if EXPERT.search(name) and EXPERT.sub("", name) in split:
            yield name, "all experts of a block are one layer, and not all of them travel in FP8"
        module, _, layer = name.removesuffix(".weight").rpartition(".")
        rows, columns = weights[name].shape[-2:]
        for parts in FUSED:
            siblings = [f"{module}.{part}.weight" for part in parts if f"{module}.{part}.weight" in weights]
            if layer not in parts or len(siblings) < 2:
                continue
            others = " and ".join(part for part in parts if part != layer)
            if not quantized.issuperset(siblings):
                yield name, f"it is one matrix with {others}, of which not all travel in FP8"
            elif rows % (block * size):
                yield (
                    name,
                    f"it is one matrix with {others}, and {rows} rows are no whole blocks of {block}{shared}",
                )
        if layer in CUT_BY_COLUMNS and size > 1 and columns % (block * size):
            yield name, f"{columns} columns are no whole blocks of {block}{shared}"
