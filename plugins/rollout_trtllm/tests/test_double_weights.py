"""Weight updates and FP8: one test for each trap of ``trtllm_contract.json``, as in test_double.py."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_double  # noqa: F401 - it makes the double importable
import pytest
import torch
from torch import Tensor
from trtllm_double.bench import (
    PROMPT,
    SIMPLE,
    complete,
    encode,
    make_engine,
    params,
    payload,
    ready_engine,
    scenario,
    sync,
    weights_of,
)
from trtllm_double.contract import FP8
from trtllm_double.wire import reduce_tensor

pytestmark = pytest.mark.usefixtures("contract_environment")
Named = dict[str, Tensor]
NORM, LAYER = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
SCALE = f"{LAYER}{FP8['scale_suffix']}"


# ---- a sync: update_weights, wire -----------------------------------------------------------------------------------


@scenario
async def test_a_sync_is_complete_and_finalised(folder: Path) -> None:
    llm, weights = await ready_engine(folder), weights_of(folder)
    with pytest.raises(RuntimeError, match="without a bucket"):
        await llm.update_weights(None)
    sent = payload({name: weight for name, weight in weights.items() if name != NORM})
    await llm.update_weights(sent)
    with pytest.raises(RuntimeError, match="not finalised"):
        llm.generate_async(PROMPT, params())
    with pytest.raises(RuntimeError, match=r"1 weights are missing.*model\.norm\.weight"):
        await llm.update_weights(None)
    with pytest.raises(RuntimeError, match="unknown handle"):  # it was dropped with the sync that it was for
        await llm.update_weights(sent)
    await sync(llm, weights)
    assert (await complete(llm)).token_ids


class Foreign:
    """What the restricted unpickler must not load."""

    def __reduce__(self) -> Any:
        return Path, ("/",)


def of_one(items: Any) -> dict[str, str]:
    return {"GPU-double-0": encode(items)}


def reused() -> dict[str, str]:
    """Return a handle to memory that is written to before the engine reads it."""
    norm = torch.ones(128)
    sent = of_one([(NORM, reduce_tensor(norm))])
    norm.fill_(2.0)
    return sent


def cut_short() -> dict[str, str]:
    function, arguments = reduce_tensor(torch.ones(1))
    return of_one([(NORM, (function, arguments[:6]))])


WIRE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "unknown uuid": (lambda: payload({NORM: torch.ones(128)}, num_workers=2), ValueError, "GPU-double-1"),
    "another global": (lambda: of_one([("name", Foreign())]), pickle.UnpicklingError, "may not be loaded"),
    "bytes of a tensor": (lambda: of_one([("name", torch.ones(2))]), pickle.UnpicklingError, "may not be loaded"),
    "no list": (lambda: of_one({"name": 1}), ValueError, "pickled list"),
    "another callable": (lambda: of_one([(NORM, (print, (1,)))]), ValueError, "rebuild"),
    "few arguments": (cut_short, ValueError, "6 arguments"),
    "memory used again": (reused, RuntimeError, r"model\.norm\.weight: re-used tensor"),
    "unknown name": (lambda: payload({"model.wieght": torch.ones(128)}), ValueError, "no such parameter"),
    "another shape": (lambda: payload({NORM: torch.ones(64)}), ValueError, "shape"),
    "another dtype": (lambda: payload({NORM: torch.ones(128).bfloat16()}), ValueError, "bfloat16"),
    "FP8 unasked": (lambda: payload({NORM: torch.ones(128).to(torch.float8_e4m3fn)}), ValueError, "FP8"),
}


@pytest.mark.parametrize("case", WIRE)
@scenario
async def test_payload_that_workers_refuse(folder: Path, case: str) -> None:
    make, error, reason = WIRE[case]
    llm = await make_engine(folder)
    with pytest.raises(error, match=reason):
        await llm.update_weights(make())


@scenario
async def test_every_worker_needs_the_same_weights_and_all_are_told_to_finalise(folder: Path) -> None:
    llm, weights = await make_engine(folder, tensor_parallel_size=2), weights_of(folder)
    with pytest.raises(RuntimeError, match=r"nothing for .*GPU-double-1"):
        await llm.update_weights(payload(weights))
    other = payload(weights_of(folder, factor=0.5), num_workers=2)
    with pytest.raises(RuntimeError, match="worker 1 got other weights"):
        await llm.update_weights(payload(weights, num_workers=2) | {"GPU-double-1": other["GPU-double-1"]})
    await llm.update_weights(payload(weights, num_workers=2))
    with pytest.raises(RuntimeError, match=r"workers \[0\] of 2"):
        await llm.collective_rpc("update_weights", (None,), target_ranks=0)


@scenario
async def test_an_extension_asks_for_partial_loading_while_nothing_runs(folder: Path) -> None:
    llm = await ready_engine(folder, ray_worker_extension_cls="double_extensions.Receiver")
    running = llm.generate_async(PROMPT, params(max_tokens=200))
    with pytest.raises(RuntimeError, match="requests run"):
        await llm.collective_rpc("receive", ({NORM: torch.ones(128)}, True))
    running.abort()
    await running
    with pytest.raises(RuntimeError, match="allow_partial_loading"):
        await llm.collective_rpc("receive", ({NORM: torch.ones(128)}, False))


# ---- fp8 ------------------------------------------------------------------------------------------------------------


def fp8_engine(folder: Path, **changed: Any) -> Any:
    settings = FP8["quantization_config"] | changed.pop("quantization", {})
    return make_engine(folder, **({"model_kwargs": {"quantization_config": settings}} | changed))


def quantised(weights: Named) -> tuple[Named, Named]:
    """Return the contract's values and scales of each linear layer, by its ``scale_value``; and what they stand for."""
    sent, meant = dict(weights), dict(weights)
    for name, weight in weights.items():
        if "_proj" not in name:
            continue
        shape = (-(-weight.shape[0] // 128), 128, -(-weight.shape[1] // 128), 128)
        scales = weight.reshape(shape).abs().amax(dim=(1, 3)) / 448
        factors = torch.kron(scales, torch.ones(128, 128))
        values = (weight / factors).to(torch.float8_e4m3fn)
        sent |= {name: values, f"{name}_scale_inv": scales}
        meant[name] = values.float() * factors
    return sent, meant


@scenario
async def test_values_times_scales_are_the_weights(blocks: Path) -> None:
    llm, plain = await fp8_engine(blocks), await make_engine(blocks)
    sent, meant = quantised(weights_of(blocks))
    await sync(llm, sent)
    await sync(plain, meant)
    assert (await complete(llm, **SIMPLE)).logprobs == (await complete(plain, **SIMPLE)).logprobs


BROKEN: dict[str, tuple[Callable[[Named], Named], str]] = {
    "no scale": (lambda w: {name: value for name, value in w.items() if name != SCALE}, f"{LAYER}: FP8 without"),
    "no weight": (lambda w: {name: value for name, value in w.items() if name != LAYER}, "not in the same update"),
    "squeezed scale": (lambda w: w | {SCALE: w[SCALE].flatten()}, f"{SCALE}: shape"),
    "scale in bfloat16": (lambda w: w | {SCALE: w[SCALE].bfloat16()}, "bfloat16"),
    "scale of NaN": (lambda w: w | {SCALE: w[SCALE] * float("nan")}, "finite"),
    "scale of 0": (lambda w: w | {SCALE: w[SCALE] * 0}, "above 0"),
    "not quantised": (lambda w: w | {LAYER: w[LAYER].float()}, "not quantised"),
    "kept weight": (lambda w: w | {"lm_head.weight": w["lm_head.weight"].to(torch.float8_e4m3fn)}, "keeps this weight"),
}


@pytest.mark.parametrize("case", BROKEN)
@scenario
async def test_fp8_weights_that_do_not_fit_are_named(blocks: Path, case: str) -> None:
    change, reason = BROKEN[case]
    llm = await fp8_engine(blocks)
    with pytest.raises(ValueError, match=reason):
        await llm.update_weights(payload(change(quantised(weights_of(blocks))[0])))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"quantization": {"weight_block_size": [64, 64]}}, "weight_block_size"),
        ({"tensor_parallel_size": 2}, "k_proj: 128 rows over 2 workers"),
        ({"quantization": {"modules_to_not_convert": ["*.k_proj"]}}, "only some are FP8"),
    ],
    ids=["another block", "blocks that straddle", "a part of a fused matrix"],
)
@scenario
async def test_fp8_that_kernels_do_not_have_is_refused(blocks: Path, changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        await fp8_engine(blocks, **changed)
