"""The double of TensorRT-LLM: weights in FP8 with their scales. Of the contract: ``fp8``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent / "double"))

from trtllm_double.bench import complete, make_engine, payload, prepare_environment, sync, weights_of
from trtllm_double.contract import CONTRACT, FP8

Named = dict[str, Tensor]
NAME = "model.layers.0.mlp.down_proj.weight"
SCALE = f"{NAME}{FP8['scale_suffix']}"
KEPT = "lm_head.weight"


def config(**changed: Any) -> LlamaConfig:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    common = {"vocab_size": 64, "num_hidden_layers": 1, "head_dim": 64, "initializer_range": 0.15}
    return LlamaConfig(**(sizes | common | changed))


def save(path: Path, **changed: Any) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config(**changed)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_environment(monkeypatch)


def quantised(weights: Named) -> Named:
    """Return the contract's ``scale_value`` for each linear layer, in blocks that begin at the first row and column."""
    result = {}
    for name, weight in weights.items():
        result[name] = weight
        if "_proj" not in name:
            continue
        values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                block = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
                scales[row, column] = weight[block].abs().max() / 448
                values[block] = (weight[block] / scales[row, column]).to(torch.float8_e4m3fn)
        result |= {name: values, f"{name}_scale_inv": scales}
    return result


def restored(weights: Named) -> Named:
    """Return what :func:`quantised` weights stand for."""
    result = {}
    for name, weight in weights.items():
        if name.endswith("_scale_inv"):
            continue
        result[name] = weight
        if f"{name}_scale_inv" in weights:
            factors = torch.kron(weights[f"{name}_scale_inv"], torch.ones(128, 128))
            result[name] = weight.float() * factors[: weight.shape[0], : weight.shape[1]]
    return result


def fp8_engine(folder: Path, **changed: Any) -> Any:
    settings = FP8["quantization_config"] | changed.pop("quantization", {})
    return make_engine(folder, **({"model_kwargs": {"quantization_config": settings}} | changed))


def test_values_times_scales_are_the_weights(folder: Path) -> None:
    async def scenario() -> None:
        llm, plain = await fp8_engine(folder), await make_engine(folder)
        weights = quantised(weights_of(folder))
        await sync(llm, weights)
        await sync(plain, restored(weights))
        asked = {"logprobs": 0, "logprobs_simple_format": True}
        got, expected = await complete(llm, **asked), await complete(plain, **asked)
        assert (got.token_ids, got.logprobs) == (expected.token_ids, expected.logprobs)

    asyncio.run(scenario())


def without(name: str) -> Callable[[Named], Named]:
    return lambda weights: {key: value for key, value in weights.items() if key != name}


def with_scale(change: Callable[[Tensor], Tensor]) -> Callable[[Named], Named]:
    return lambda weights: weights | {SCALE: change(weights[SCALE])}


BROKEN: dict[str, tuple[Callable[[Named], Named], str, str]] = {
    "no scale": (without(SCALE), NAME, "FP8 without"),
    "no weight": (without(NAME), SCALE, "not in the same update"),
    "scale of a kept weight": (lambda w: w | {f"{KEPT}_scale_inv": torch.ones(1, 2)}, f"{KEPT}_scale_inv", "not FP8"),
    "scale of no weight": (lambda w: w | {"a.weight_scale_inv": torch.ones(1)}, "a.weight_scale_inv", "unknown"),
    "squeezed scale": (with_scale(lambda scale: scale.flatten()), SCALE, "shape"),
    "scale of other blocks": (with_scale(lambda scale: scale[:, :1]), SCALE, "shape"),
    "scale in bfloat16": (with_scale(lambda scale: scale.bfloat16()), SCALE, "bfloat16"),
    "scale of NaN": (with_scale(lambda scale: scale * float("nan")), SCALE, "finite"),
    "scale of infinity": (with_scale(lambda scale: scale / 0), SCALE, "finite"),
    "scale of 0": (with_scale(lambda scale: scale * 0), SCALE, "above 0"),
    "scale below 0": (with_scale(lambda scale: -scale), SCALE, "above 0"),
    "not quantised": (lambda w: w | {NAME: w[NAME].float()}, NAME, "not quantised"),
    "another FP8": (lambda w: w | {NAME: w[NAME].float().to(torch.float8_e5m2)}, NAME, "not quantised"),
    "kept weight in FP8": (lambda w: w | {KEPT: w[KEPT].to(torch.float8_e4m3fn)}, KEPT, "keeps this weight"),
    "another shape": (lambda w: w | {NAME: w[NAME].T.contiguous()}, NAME, "shape"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_weight_that_does_not_fit_is_named(folder: Path, case: str) -> None:
    change, name, reason = BROKEN[case]

    async def scenario() -> None:
        llm = await fp8_engine(folder)
        with pytest.raises(ValueError, match=f"^{name}: .*{reason}"):
            await llm.update_weights(payload(change(quantised(weights_of(folder)))))

    asyncio.run(scenario())


def test_weight_and_scale_in_two_updates_are_refused(folder: Path) -> None:
    async def scenario() -> None:
        llm = await fp8_engine(folder)
        with pytest.raises(ValueError, match=f"^{NAME}: FP8 without"):
            await llm.update_weights(payload({NAME: quantised(weights_of(folder))[NAME]}))

    asyncio.run(scenario())


def test_fp8_without_quantization_config_is_refused(folder: Path) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder)
        with pytest.raises(ValueError, match=r"_proj\.weight: an FP8 weight, and no model_kwargs"):
            await llm.update_weights(payload(quantised(weights_of(folder))))

    asyncio.run(scenario())


def test_modules_that_are_not_converted_stay(folder: Path) -> None:
    async def scenario() -> None:
        kept = {"modules_to_not_convert": [NAME.removesuffix(".weight")]}
        llm, weights = await fp8_engine(folder, quantization=kept), weights_of(folder)
        await sync(llm, without(SCALE)(quantised(weights) | {NAME: weights[NAME]}))
        assert (await complete(llm)).token_ids

    asyncio.run(scenario())


def test_bfloat16_engine_rounds_what_it_calculates(folder: Path) -> None:
    async def scenario() -> None:
        llm = await fp8_engine(folder, dtype="bfloat16")
        weights = quantised(weights_of(folder))
        await sync(llm, {name: value if "_proj" in name else value.bfloat16() for name, value in weights.items()})
        assert len((await complete(llm)).token_ids) == 6

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "changed",
    [{"fmt": "e5m2"}, {"activation_scheme": "static"}, {"weight_block_size": [64, 64]}, {"ignored": []}],
    ids=str,
)
def test_other_quantization_is_refused(folder: Path, changed: dict[str, Any]) -> None:
    async def scenario() -> None:
        with pytest.raises(ValueError, match=next(iter(changed))):
            await fp8_engine(folder, quantization=changed)

    asyncio.run(scenario())


def test_fp8_asks_for_dummy_weights(folder: Path) -> None:
    with pytest.raises(ValueError, match=CONTRACT["fp8"]["load_format"]):
        fp8_engine(folder, load_format="auto")


@pytest.mark.parametrize(
    ("changed", "layer"),
    [({"num_key_value_heads": 1}, "k_proj: 64 rows"), ({"intermediate_size": 320}, "gate_proj: 320 rows")],
    ids=["qkv", "gate and up"],
)
def test_blocks_that_straddle_fused_parts_are_refused(tmp_path: Path, changed: dict[str, Any], layer: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ValueError, match=f"{layer}.*no whole blocks"):
            await fp8_engine(save(tmp_path, **changed))

    asyncio.run(scenario())


def test_straddling_layers_that_are_kept_are_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        kept = {"modules_to_not_convert": [f"*.{part}_proj" for part in "qkv"]}
        await fp8_engine(save(tmp_path, num_key_value_heads=1), quantization=kept)

    asyncio.run(scenario())


def test_fused_matrix_of_which_a_part_is_kept_is_refused(folder: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ValueError, match="only some are FP8"):
            await fp8_engine(folder, quantization={"modules_to_not_convert": ["*.k_proj"]})

    asyncio.run(scenario())


def test_workers_share_fused_matrices_in_whole_blocks(folder: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ValueError, match="k_proj: 128 rows over 2 workers"):
            await fp8_engine(folder, tensor_parallel_size=2)

    asyncio.run(scenario())
