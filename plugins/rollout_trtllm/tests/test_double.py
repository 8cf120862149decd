"""One test for each trap of ``trtllm_contract.json``: where the double has none, the kit over it proves nothing."""

from __future__ import annotations

import asyncio
import functools
import pickle
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import on_double  # noqa: F401 - it makes the double importable
import pytest
import torch
from tensorrt_llm import AsyncLLM, SamplingParams
from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from trtllm_double.bench import (
    PROMPT,
    complete,
    encode,
    make_engine,
    params,
    payload,
    prepare_environment,
    ready_engine,
    sync,
    weights_of,
)
from trtllm_double.contract import CONTRACT, FP8, SAMPLING
from trtllm_double.wire import reduce_tensor

from rlplug.testing.models import make_model_folder

Named = dict[str, Tensor]
ALL = CONTRACT["ExecutorMemoryType"]
SIMPLE = {"logprobs": 0, "logprobs_simple_format": True}
NORM, LAYER = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
SCALE = f"{LAYER}{FP8['scale_suffix']}"


class Conflicting(WorkerExtension):
    """An extension that defines what workers have."""

    def sleep(self) -> None: ...


class Receiver(WorkerExtension):
    """An extension that gets weights by a way of its own."""

    def receive(self, weights: Named, is_partial: bool) -> None:
        engine = self.engine.model_engine
        engine.model_loader.reload(engine.model, weights, allow_partial_loading=is_partial)


def scenario(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an ``async`` test."""

    @functools.wraps(test)
    def run(*arguments: Any, **keywords: Any) -> None:
        asyncio.run(test(*arguments, **keywords))

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model_folder("llama", path)
    return path


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers are more than one block of FP8."""
    path = tmp_path_factory.mktemp("blocks")
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=64, num_hidden_layers=1, head_dim=64, initializer_range=0.15)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_environment(monkeypatch)
    monkeypatch.setitem(sys.modules, "double_extensions", sys.modules[__name__])


# ---- AsyncLLM.__init__, environment, rpc ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "reason"),
    [
        ({"enable_sleep": True}, ValueError, "enable_sleep is forbidden"),
        ({"gpu_memory_utilization": 0.5}, ValueError, "unknown keyword gpu_memory_utilization"),
        ({"backend": "tensorrt"}, ValueError, "backend"),
        ({"kv_cache_config": CudaGraphConfig()}, TypeError, "kv_cache_config"),
        ({"placement_groups": ["a"], "placement_bundle_indices": [[0]], "tensor_parallel_size": 2}, ValueError, "2 w"),
        ({"model_kwargs": {"quantization_config": {}}, "load_format": "auto"}, ValueError, "load_format='dummy'"),
        ({"ray_worker_extension_cls": "double_extensions.Missing"}, RuntimeError, "Missing"),
        ({"ray_worker_extension_cls": "double_extensions.Path"}, TypeError, "no subclass"),
        ({"ray_worker_extension_cls": "double_extensions.Conflicting"}, ValueError, "sleep"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_the_engine_refuses(
    folder: Path, given: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        make_engine(folder, **given)


def test_a_positional_model_and_unknown_fields_are_refused(folder: Path) -> None:
    with pytest.raises(TypeError, match="positional"):
        AsyncLLM(str(folder))
    with pytest.raises(TypeError, match="block_reuse"):
        KvCacheConfig(block_reuse=True)


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", *(each.partition("=")[0] for each in CONTRACT["environment"]["set"])])
def test_another_environment_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "0")
    with pytest.raises(RuntimeError, match=name):
        make_engine(folder)


@scenario
async def test_workers_have_no_other_methods(folder: Path) -> None:
    with pytest.raises(AttributeError, match="flush_cache"):
        await (await make_engine(folder)).collective_rpc("flush_cache")


# ---- requests: methods.generate_async, SamplingParams, output -------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "asked", "reason"),
    [
        ({"max_seq_len": 4}, {}, "max_seq_len"),
        ({"max_input_len": 3}, {}, "max_input_len"),
        ({"max_num_tokens": 3}, {}, "max_num_tokens"),
        ({}, {"detokenize": True}, "detokenize"),
        ({}, {"end_id": None}, "end_id"),
    ],
)
@scenario
async def test_requests_that_the_engine_refuses(
    folder: Path, limits: dict[str, int], asked: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        (await ready_engine(folder, **limits)).generate_async(PROMPT, params(**asked))


@pytest.mark.parametrize(
    ("given", "error", "reason"),
    [
        ({"top_k": -1}, ValueError, "top_k"),
        ({"n": 2}, ValueError, "multiple returns"),
        ({"logprobs_simple_format": True}, ValueError, "logprobs == 0"),
        ({"logprobs_mode": "PROCESSED"}, ValueError, "PROCESSED"),
        ({"max_new_tokens": 3}, TypeError, "max_new_tokens"),
    ],
)
def test_sampling_that_the_engine_refuses(given: dict[str, Any], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        SamplingParams(**given)


@scenario
async def test_unset_sampling_is_greedy_and_ends_after_32_tokens(folder: Path) -> None:
    llm = await ready_engine(folder)
    first, again = [await complete(llm, seed=seed) for seed in (1, 2)]
    assert first.token_ids == again.token_ids
    drawn = [await complete(llm, temperature=1.0, seed=seed, max_tokens=12) for seed in (1, 2)]
    assert drawn[0].token_ids != drawn[1].token_ids
    default = await llm.generate_async(PROMPT, SamplingParams(end_id=-1, detokenize=False))
    assert len(default.outputs[0].token_ids) == SAMPLING["defaults"]["max_tokens"] == 32


@scenario
async def test_logprobs_are_raw_unless_asked_for(folder: Path) -> None:
    llm = await ready_engine(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.tensor([PROMPT])).logits[0, -1].detach().double()
    given = {"temperature": 0.5, "top_k": 3, "seed": 1, **SIMPLE}
    raw, processed = await complete(llm, **given), await complete(llm, **given, logprobs_mode="processed")
    assert raw.logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[raw.token_ids[0]]), abs=1e-5)
    top = (logits / 0.5).topk(3)
    expected = top.values.log_softmax(-1)[top.indices.tolist().index(processed.token_ids[0])]
    assert processed.logprobs[0] == pytest.approx(float(expected), abs=1e-5)
    greedy = await complete(llm, **SIMPLE, logprobs_mode="processed")
    assert greedy.logprobs == [0.0] * 6


@scenario
async def test_the_first_of_several_logprobs_is_not_always_the_sampled(folder: Path) -> None:
    output = await complete(await ready_engine(folder), temperature=5.0, seed=2, logprobs=2, max_tokens=40)
    last = [list(entry)[-1] == token for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
    assert sum(last) > 10


@scenario
async def test_end_id_stays_and_stop_tokens_are_cut_off(folder: Path) -> None:
    llm = await ready_engine(folder)
    tokens = (await complete(llm)).token_ids
    end = next(token for token in tokens if token != tokens[0])
    until = tokens[: tokens.index(end) + 1]
    assert (await complete(llm, end_id=end)).token_ids == until
    cut = await complete(llm, stop_token_ids=[end], logprobs=0)
    assert (cut.token_ids, cut.finish_reason, len(cut.logprobs)) == (until[:-1], "stop", len(until))
    assert (await complete(llm, stop_token_ids=[end], include_stop_str_in_output=True)).token_ids == until


@scenario
async def test_a_pause_aborts_and_refuses(folder: Path) -> None:
    llm = await ready_engine(folder)
    long = llm.generate_async(PROMPT, params(max_tokens=1000))
    await llm.pause_generation()
    assert long.outputs[0].finish_reason == "cancelled"
    with pytest.raises(RuntimeError, match="resume_generation"):
        llm.generate_async(PROMPT, params())
    await llm.resume_generation()
    assert len((await complete(llm)).token_ids) == 6


@scenario
async def test_the_prefix_cache_outlives_weights(folder: Path) -> None:
    llm = await ready_engine(folder)
    before = await complete(llm, **SIMPLE)
    await sync(llm, weights_of(folder, factor=0.7))
    assert (await complete(llm, **SIMPLE)).logprobs[0] == before.logprobs[0]
    await llm.collective_rpc("reset_prefix_cache")
    assert (await complete(llm, **SIMPLE)).logprobs[0] != before.logprobs[0]


# ---- memory: SleepConfig, order -------------------------------------------------------------------------------------


@scenario
async def test_the_order_of_the_contract_and_no_other(folder: Path) -> None:
    llm = await ready_engine(folder)
    weights, before = weights_of(folder), (await complete(llm)).token_ids
    running = llm.generate_async(PROMPT, params(max_tokens=40))
    with pytest.raises(RuntimeError, match="1 requests run"):
        await llm.release(ALL)
    await running
    await llm.release(ALL)
    for refused, reason in (
        (lambda: llm.release(ALL), "released already"),
        (lambda: llm.update_weights(payload(weights)), "resume them first"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            await refused()
    await llm.resume([tag for tag in ALL if tag != "kv_cache"])
    with pytest.raises(RuntimeError, match="kv_cache"):
        llm.generate_async(PROMPT, params())
    await llm.resume(["kv_cache"])
    with pytest.raises(RuntimeError, match="not complete"):  # what slept is lost
        llm.generate_async(PROMPT, params())
    with pytest.raises(RuntimeError, match="not released"):
        await llm.resume(["kv_cache"])
    await sync(llm, weights)
    assert (await complete(llm)).token_ids == before


@scenario
async def test_release_without_sleep_config_is_refused(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="sleep_config"):
        await (await make_engine(folder, sleep_config=None)).release(ALL)


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
