"""Records of the weight sync, which sends the trainer's weights to an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

Bucket: TypeAlias = Sequence[tuple[str, Tensor]]
"""Full (unsharded) tensors under their Hugging Face names, of bounded total size; valid until the next bucket."""


@dataclass(frozen=True)
class SyncReport:
    """Size, duration and policy version of one weight sync.

    Attributes:
        parts: Seconds of its parts by name, as far as an engine measures them; the metrics ``sync/<name>_s``.
    """

    num_bytes: int
    num_buckets: int
    num_tensors: int
    seconds: float
    policy_version: int
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor in a weight sync."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class HFWeight:
    """A weight of a checkpoint: a parameter, or some of its rows, such as one expert's matrix of a parameter [E, O, I].

    Rows are counted over all dimensions but the last.

    Attributes:
        name: Name in the checkpoint.
        shape: Shape in the checkpoint.
        first_row: Index of its first row in the parameter; ``None`` for all of the parameter.
        convert: Computes it from the whole parameter, where it is not a view of it; ``None`` where it is.
    """

    name: str
    shape: torch.Size
    first_row: int | None = None
    convert: Callable[[Tensor], Tensor] | None = None

    @property
    def num_rows(self) -> int:
        """Number of its rows."""
        return self.shape[:-1].numel()

    def of(self, parameter: Tensor) -> Tensor:
        """Return the weight of ``parameter``, which must be unsharded; a view of it unless it is converted."""
        if self.convert is not None:
            return self.convert(parameter)
        if self.first_row is None:
            return parameter
        rows = parameter.flatten(0, -2)[self.first_row : self.first_row + self.num_rows]
        return rows.view(*self.shape[:-1], -1)

    def scales_of(self, scales: Tensor, block: int) -> Tensor:
        """Return the weight's part of the parameter's scales, which have one row for each ``block`` rows."""
        if self.first_row is None:
            return scales
        return scales[self.first_row // block : (self.first_row + self.num_rows) // block]


WeightsOfParameters: TypeAlias = Mapping[str, Sequence[HFWeight]]
"""Weights of a checkpoint that each parameter of a network becomes, by the parameter's name."""


@dataclass(frozen=True)
class AdapterWeights:
    """Low-rank adapters that an engine serves: LoRA, arXiv:2106.09685.

    The first weight sync after each start brings all weights of the policy, which are frozen, and the adapters; every
    later sync brings the adapters alone. An engine keeps the frozen weights until it is closed, also while it sleeps.

    The adapter of a layer with the weight W [O, I] is two tensors in the policy's dtype, A [rank, I] and B [O, rank],
    under :meth:`names`; with it the layer computes W x + alpha / rank * B A x.

    Attributes:
        rank: Rank of all adapters.
        alpha: Their updates are scaled by alpha / rank.
        modules: Checkpoint names of the adapted layers, such as ``model.layers.0.self_attn.q_proj``.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]

    @staticmethod
    def names(module: str) -> tuple[str, str]:
        """Return the names under which A and B of a layer are sent."""
        return f"{module}.lora_A.weight", f"{module}.lora_B.weight"

    def tensors(self, weights: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Return shape and dtype of each tensor of the adapters.

        Args:
            weights: Those of the frozen weights, by checkpoint name.
        """
        found: dict[str, TensorInfo] = {}
        for module in self.modules:
            weight = weights[f"{module}.weight"]
            (num_rows, num_columns), (down, up) = weight.shape, self.names(module)
            found[down] = TensorInfo(torch.Size((self.rank, num_columns)), weight.dtype)
            found[up] = TensorInfo(torch.Size((num_rows, self.rank)), weight.dtype)
        return found


@dataclass(frozen=True)
class FP8Weights:
    """Names of the weights that are sent in FP8, with a scale for each block of 128 x 128.

    A weight [O, I] becomes two tensors of one bucket: float8_e4m3fn [O, I] under its own name, and its scales, float32
    [ceil(O / 128), ceil(I / 128)], under :meth:`scale_name`. Values times their block's scale are the weight. Blocks
    begin at the first row and column; the last ones may be smaller. The format is that of DeepSeek-V3,
    arXiv:2412.19437, section 3.3.

    Attributes:
        BLOCK: Number of rows and of columns of a block.
        quantized: Names of the weights that are sent in FP8.
        kept: Names of the weights of all other linear layers, the LM head included, which are sent in the policy's
            dtype.
        power_of_two_scales: Whether scales are powers of two.
    """

    BLOCK: ClassVar[int] = 128
    DTYPE: ClassVar[torch.dtype] = torch.float8_e4m3fn

    quantized: tuple[str, ...]
    kept: tuple[str, ...]
    power_of_two_scales: bool = False

    @staticmethod
    def scale_name(name: str) -> str:
        """Return the name under which a weight's scales are sent."""
        return f"{name}_scale_inv"

    @classmethod
    def scale_shape(cls, shape: torch.Size) -> torch.Size:
        """Return the shape of the scales of a weight of ``shape``, [O, I]."""
        return torch.Size(-(-size // cls.BLOCK) for size in shape)

    def quantization_config(self) -> dict[str, Any]:
        """Return the ``quantization_config`` of Hugging Face's ``config.json``, by which engines build layers."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [self.BLOCK, self.BLOCK],
            "modules_to_not_convert": [name.removesuffix(".weight") for name in self.kept],
        }
