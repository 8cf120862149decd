"""Shapes of published models against the numbers of parameters on their cards, and what a size takes."""

from __future__ import annotations

import pytest
import torch
from rlplug_plan.model_shape import ModelShape
from rlplug_plan.shapes import PUBLISHED, parse_size, shape_of
from transformers import AutoConfig, AutoModelForCausalLM

from rlplug.errors import ConfigError

BILLIONS = {
    "SmolLM2-135M": 0.135,
    "SmolLM2-360M": 0.362,
    "Qwen2.5-0.5B": 0.49,
    "Qwen3-0.6B": 0.6,
    "Llama-3.2-1B": 1.23,
    "Qwen2.5-1.5B": 1.54,
    "Qwen3-1.7B": 1.7,
    "Qwen2.5-3B": 3.09,
    "Qwen3-4B": 4.0,
    "Qwen2.5-7B": 7.61,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Llama-3.1-70B": 70.6,
    "Qwen2.5-72B": 72.7,
    "Llama-3.1-405B": 405,
}
"""As the models' cards on the Hugging Face Hub have them, most to two or three digits."""


def made(config: dict) -> ModelShape:
    with torch.device("meta"):
        return ModelShape.of(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)))


@pytest.mark.parametrize("shape", PUBLISHED, ids=lambda shape: shape.path.partition("/")[2])
def test_a_shape_has_the_parameters_of_its_model(shape) -> None:
    """Catches a width, a vocabulary or tied embeddings that are not the model's."""
    assert shape.parameters / 1e9 == pytest.approx(BILLIONS[shape.path.partition("/")[2]], rel=0.015)
    few = made(shape.config(2))  # of all blocks it takes seconds
    assert few.parameters == pytest.approx(shape.end_parameters + 2 * shape.block_parameters, rel=0.001)


def test_layers_with_a_state_keep_no_keys_and_what_their_kernels_keep() -> None:
    """Catches a hybrid whose layers all count as attention: four times the cache, a third of what delta nets keep.

    Numbers are those of Qwen3-Next's widths, from the sizes of the tensors that flash-linear-attention saves.
    """
    config = AutoConfig.for_model(
        "qwen3_next", num_hidden_layers=4, num_experts=4, vocab_size=64, max_position_embeddings=64
    )
    assert config.layer_types == [*["linear_attention"] * 3, "full_attention"]
    with torch.device("meta"):
        shape = ModelShape.of(AutoModelForCausalLM.from_config(config))
    assert shape.kv_elements == 2 * 2 * 256  # one layer, two heads of keys and of values
    delta = 12288 + 16384 + 64 * 32 + 8192 + 4 * 32  # projections, convolved, chunks, outputs, decays
    assert shape.mixing == (3 * delta + 2 * 4096 + 2 * 512) // 4


@pytest.mark.parametrize(
    ("size", "path"),
    [
        ("0.6B", "Qwen/Qwen3-0.6B"),
        ("1.7B", "Qwen/Qwen3-1.7B"),
        ("7B", "Qwen/Qwen2.5-7B"),
        ("8b", "Qwen/Qwen3-8B"),
        ("500M", "Qwen/Qwen2.5-0.5B"),
        ("70B", "meta-llama/Llama-3.1-70B"),
        ("7.6B", "Qwen/Qwen2.5-7B"),
    ],
)
def test_a_known_size_takes_the_model_that_has_it(size: str, path: str) -> None:
    found = shape_of(size)
    assert found.path == path
    assert path in found.says
    assert "no known model" not in found.says


@pytest.mark.parametrize(("size", "nearest"), [("12B", "Qwen3-14B"), ("20M", "SmolLM2-135M"), ("2T", "405B")])
def test_another_size_is_the_nearest_shape_with_other_blocks(size: str, nearest: str) -> None:
    """Catches the nearest model taken as it is, and an embedding that alone is more than what was asked for."""
    found = shape_of(size)
    assert found.path is None
    assert "no known model has this size" in found.says
    assert nearest in found.says
    assert found.config["num_hidden_layers"] >= 1
    if size != "20M":
        shape = next(shape for shape in PUBLISHED if nearest in shape.path)
        parameters = shape.end_parameters + found.config["num_hidden_layers"] * shape.block_parameters
        assert parameters == pytest.approx(parse_size(size), abs=shape.block_parameters / 2)


@pytest.mark.parametrize("text", ["7", "B", "-7B", "7GB", "0B", "7e9", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"such as 0\.6B, 7B or 500M"):
        shape_of(text)
