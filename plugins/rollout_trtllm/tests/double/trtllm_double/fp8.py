"""Weights in FP8: the contract's ``fp8``."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn

from rlplug.weight_sync.hf_names import hf_weights
from trtllm_double.contract import FP8

SUFFIX: Final[str] = FP8["scale_suffix"]
DTYPE: Final = {"e4m3": torch.float8_e4m3fn}[FP8["quantization_config"]["fmt"]]
SCALE_DTYPE: Final = getattr(torch, FP8["scale_dtype"])
BLOCK: Final[tuple[int, int]] = tuple(FP8["quantization_config"]["weight_block_size"])
FUSED: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Parts that become one matrix, rows below rows."""


class FP8Layers:
    """Which weights of a model are FP8, and the checks of what comes for them.

    Args:
        model: Its linear layers are FP8, and those of its experts, but for ``kept_in_bf16`` and
            ``modules_to_not_convert``.
        config: Of ``model_kwargs.quantization_config``; ``None`` when no layer is.
        tensor_parallel_size: Workers that share each fused matrix.

    Raises:
        ValueError: The configuration is not the contract's, or blocks straddle the parts of a fused matrix.
    """

    def __init__(self, model: nn.Module, config: Mapping[str, Any] | None, tensor_parallel_size: int) -> None:
        self.is_enabled = config is not None
        self.shapes: dict[str, torch.Size] = {}
        if config is None:
            return
        others = dict(config)
        kept = [*FP8["kept_in_bf16"], *(others.pop("modules_to_not_convert", None) or [])]
        for key, value in FP8["quantization_config"].items():
            if others.pop(key, None) != value:
                raise ValueError(f"quantization_config.{key} must be {value!r}, and is {config.get(key)!r}")
        if others:
            raise ValueError(f"quantization_config has unknown keys {sorted(others)}")
        linear = {name: module.weight.shape for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        for weight in chain.from_iterable(hf_weights(model).values()):
            if weight.first_row is not None and len(weight.shape) == 2:
                linear[weight.name.removesuffix(".weight")] = weight.shape
        for name, shape in linear.items():
            if not any(_matches(name, pattern) for pattern in kept):
                self.shapes[f"{name}.weight"] = shape
        self._check_fused(linear, tensor_parallel_size)

    def _check_fused(self, linear: Iterable[str], tensor_parallel_size: int) -> None:
        for module in linear:
            parent, _, part = module.rpartition(".")
            for parts in FUSED:
                siblings = [f"{parent}.{other}.weight" for other in parts if f"{parent}.{other}" in linear]
                if part not in parts or len(siblings) < 2 or f"{module}.weight" not in self.shapes:
                    continue
                if not all(sibling in self.shapes for sibling in siblings):
                    raise ValueError(f"{module}: of {parts}, which are one matrix, only some are FP8")
                rows = self.shapes[f"{module}.weight"][0]
                if rows % (BLOCK[0] * tensor_parallel_size):
                    raise ValueError(
                        f"{module}: {rows} rows over {tensor_parallel_size} workers are no whole blocks of {BLOCK[0]}, "
                        f"and {parts} are one matrix: a block would straddle two of them"
                    )

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise ValueError, with the name, unless FP8 weights and their scales fit and come together."""
        for name, tensor in weights.items():
            if name in self.shapes:
                self._check_pair(name, tensor, weights)
            elif self.is_enabled and name.endswith(SUFFIX):
                weight = name.removesuffix(SUFFIX)
                if weight not in self.shapes:
                    raise ValueError(f"{name}: a scale of a weight that is unknown or not FP8")
                if weight not in weights:
                    raise ValueError(f"{name}: its weight is not in the same update")
            elif tensor.dtype == DTYPE:
                why = "the engine keeps this weight" if self.is_enabled else f"no {FP8['passed_as']} was given"
                raise ValueError(f"{name}: an FP8 weight, and {why}")

    def _check_pair(self, name: str, tensor: Tensor, weights: Mapping[str, Tensor]) -> None:
        if tensor.dtype != DTYPE:
            raise ValueError(f"{name}: {tensor.dtype}, and the engine's layer is {DTYPE}: it was not quantised")
        if f"{name}{SUFFIX}" not in weights:
            raise ValueError(f"{name}: FP8 without {name}{SUFFIX} in the same update")
        scale = weights[f"{name}{SUFFIX}"]
        expected = scale_shape(self.shapes[name])
        if scale.shape != expected:
            raise ValueError(f"{name}{SUFFIX}: shape {list(scale.shape)}, and {FP8['scale_shape']} is {list(expected)}")
        if scale.dtype != SCALE_DTYPE:
            raise ValueError(f"{name}{SUFFIX}: {scale.dtype}, and scales are {SCALE_DTYPE}")
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise ValueError(f"{name}{SUFFIX}: scales must be finite and above 0")


def scale_shape(shape: torch.Size) -> torch.Size:
    """Return the contract's ``scale_shape``."""
    return torch.Size(-(-size // block) for size, block in zip(shape, BLOCK, strict=True))


def dequantise(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each value times its block's scale, calculated in float32."""
    rows = scale.repeat_interleave(BLOCK[0], dim=0)[: weight.shape[0]]
    factors = rows.repeat_interleave(BLOCK[1], dim=1)[:, : weight.shape[1]]
    return (weight.float() * factors).to(dtype)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern is of the whole name, or of its end after a dot."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")
