"""What attention and layers with a state keep of each token, by the kinds of layers in a configuration.

Layers with a state are counted as their kernels keep tensors (flash-linear-attention 0.4, mamba-ssm 2.2); the functions
in torch that take their place without kernels keep many times as much.
"""

from __future__ import annotations

from typing import Any, Final

from rlplug.models.shape import Widths

CHUNK: Final = 64
"""Tokens of a chunk of the delta rule, whose products with each other are kept."""


def keeps_keys(kind: str) -> bool:
    """Return whether an engine keeps keys and values of the tokens in a layer of that kind of ``layer_types``."""
    return kind == "hybrid" or ("attention" in kind and "linear" not in kind)


def kinds_of(config: Any) -> list[str]:
    """Return the kind of each layer; all attend where the configuration has no ``layer_types``."""
    return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)


def mixing_elements(config: Any, widths: Widths) -> int:
    """Return what a block keeps of a token to mix it with others, in elements of the pass's dtype, on average."""
    attention, state = 2 * widths.query + 2 * widths.key, state_elements(config)
    of_kind: dict[str, int] = {"hybrid": attention + (state or 0), "conv": 5 * config.hidden_size, "moe": 0, "mlp": 0}
    kinds = kinds_of(config)
    kept = [of_kind.get(kind, attention if keeps_keys(kind) or state is None else state) for kind in kinds]
    return sum(kept) // len(kept)


def state_elements(config: Any) -> int | None:
    """Return what a gated delta net or Mamba 2 keeps of a token; ``None`` for layers of which nothing is known."""

    def size(*options: str) -> int:
        return next((value for option in options if isinstance(value := getattr(config, option, None), int)), 0)

    if heads := size("linear_num_value_heads"):
        key, value = size("linear_num_key_heads") * size("linear_key_head_dim"), heads * size("linear_value_head_dim")
        projections, convolved, output = 2 * key + 2 * value, 2 * (2 * key + value), 2 * value
        return projections + convolved + CHUNK * heads + output + 4 * heads  # float32 decays and steps
    if heads := size("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"):
        inner = heads * size("mamba_d_head", "mamba_head_dim", "mamba_headdim")
        groups = size("mamba_n_groups", "mamba_ngroups", "n_groups")
        return 3 * inner + 2 * groups * size("mamba_d_state", "ssm_state_size") + heads
    return None
