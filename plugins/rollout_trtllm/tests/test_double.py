"""Requests and memory: one test for each trap of ``trtllm_contract.json``, without which the kit proves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import on_double  # noqa: F401 - it makes the double importable
import pytest
import torch
from tensorrt_llm import AsyncLLM, SamplingParams
from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig
from transformers import AutoModelForCausalLM
from trtllm_double.bench import (
    PROMPT,
    SIMPLE,
    complete,
    make_engine,
    params,
    payload,
    ready_engine,
    scenario,
    sync,
    weights_of,
)
from trtllm_double.contract import CONTRACT, SAMPLING

pytestmark = pytest.mark.usefixtures("contract_environment")
ALL = CONTRACT["ExecutorMemoryType"]


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
        ({"ray_worker_extension_cls": "pathlib.Path"}, TypeError, "no subclass"),
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
