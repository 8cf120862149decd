"""Shapes of published dense models, from which ``rlplug plan --model-size`` takes one."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Final

from rlplug.errors import ConfigError

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmbt])\s*", re.IGNORECASE)
_UNITS: Final = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
NEAR: Final = 0.03
"""How far a size may be from a model's number of parameters, or from that in its name, to be that model's."""


@dataclass(frozen=True)
class Shape:
    """A dense model's shape, as its published ``config.json`` has it."""

    path: str
    """Its name on the Hugging Face Hub."""
    model_type: str
    hidden: int
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool
    context: int

    @property
    def block_parameters(self) -> int:
        """Parameters of a block's matrices; norms and biases are below a thousandth."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * query + 2 * key + 3 * self.mlp)

    @property
    def end_parameters(self) -> int:
        """Parameters of input embeddings and output layer."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.end_parameters + self.blocks * self.block_parameters

    @property
    def named_size(self) -> float:
        """The size in its name."""
        return parse_size(next(part for part in re.split(r"[-_]", self.path) if _SIZE.fullmatch(part)))

    def config(self, blocks: int) -> dict[str, Any]:
        """Return its ``config.json`` with as many blocks."""
        return {
            "architectures": [f"{self.model_type.capitalize()}ForCausalLM"],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "num_hidden_layers": blocks,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.context,
        }


PUBLISHED: Final = (
    Shape("HuggingFaceTB/SmolLM2-135M", "llama", 576, 30, 9, 3, 64, 1536, 49152, True, 8192),
    Shape("HuggingFaceTB/SmolLM2-360M", "llama", 960, 32, 15, 5, 64, 2560, 49152, True, 8192),
    Shape("Qwen/Qwen2.5-0.5B", "qwen2", 896, 24, 14, 2, 64, 4864, 151936, True, 32768),
    Shape("Qwen/Qwen3-0.6B", "qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True, 40960),
    Shape("meta-llama/Llama-3.2-1B", "llama", 2048, 16, 32, 8, 64, 8192, 128256, True, 131072),
    Shape("Qwen/Qwen2.5-1.5B", "qwen2", 1536, 28, 12, 2, 128, 8960, 151936, True, 131072),
    Shape("Qwen/Qwen3-1.7B", "qwen3", 2048, 28, 16, 8, 128, 6144, 151936, True, 40960),
    Shape("Qwen/Qwen2.5-3B", "qwen2", 2048, 36, 16, 2, 128, 11008, 151936, True, 32768),
    Shape("Qwen/Qwen3-4B", "qwen3", 2560, 36, 32, 8, 128, 9728, 151936, True, 40960),
    Shape("Qwen/Qwen2.5-7B", "qwen2", 3584, 28, 28, 4, 128, 18944, 152064, False, 131072),
    Shape("Qwen/Qwen3-8B", "qwen3", 4096, 36, 32, 8, 128, 12288, 151936, False, 40960),
    Shape("Qwen/Qwen3-14B", "qwen3", 5120, 40, 40, 8, 128, 17408, 151936, False, 40960),
    Shape("Qwen/Qwen3-32B", "qwen3", 5120, 64, 64, 8, 128, 25600, 151936, False, 40960),
    Shape("meta-llama/Llama-3.1-70B", "llama", 8192, 80, 64, 8, 128, 28672, 128256, False, 131072),
    Shape("Qwen/Qwen2.5-72B", "qwen2", 8192, 80, 64, 8, 128, 29568, 152064, False, 131072),
    Shape("meta-llama/Llama-3.1-405B", "llama", 16384, 126, 128, 8, 128, 53248, 128256, False, 131072),
)


@dataclass(frozen=True)
class TakenShape:
    """What a size stands for."""

    config: dict[str, Any]
    """The content of a ``config.json``."""
    says: str
    """Whose shape it is, in words."""
    path: str | None
    """Name of the model; ``None`` for a shape that no known model has."""


def parse_size(text: str) -> float:
    """Return a number of parameters, such as 0.6B, 7b or 500M.

    Raises:
        ConfigError: It is none.
    """
    found = _SIZE.fullmatch(text)
    if found is None or (size := float(found[1]) * _UNITS[found[2].lower()]) < 1e6:
        raise ConfigError(
            f"--model-size is {text!r}: write a number of parameters from 1M on, such as 0.6B, 7B or 500M."
        )
    return size


def shape_of(text: str) -> TakenShape:
    """Return the shape of a model of a size: the one that is named so, else the nearest with more or fewer blocks.

    Raises:
        ConfigError: ``text`` is no size.
    """
    size = parse_size(text)
    by_name = [shape for shape in PUBLISHED if math.isclose(shape.named_size, size, rel_tol=1e-9)]
    near = [shape for shape in PUBLISHED if abs(shape.parameters / size - 1) <= NEAR]
    for shape in (*by_name, *near):
        says = f"{text}: the shape of {shape.path}, {_billions(shape.parameters)} parameters"
        return TakenShape(shape.config(shape.blocks), says, shape.path)
    nearest = min(PUBLISHED, key=lambda shape: abs(math.log(shape.parameters / size)))
    blocks = max(1, round((size - nearest.end_parameters) / nearest.block_parameters))
    parameters = nearest.end_parameters + blocks * nearest.block_parameters
    says = (
        f"{text}: no known model has this size; the shape of {nearest.path} with {blocks} blocks in place of "
        f"{nearest.blocks}, {_billions(parameters)} parameters"
    )
    return TakenShape(nearest.config(blocks), says, None)


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"
