"""The double of TensorRT-LLM: which requests it takes, and how they run and end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlplug.testing.models import ENDS, make_model_folder

sys.path.insert(0, str(Path(__file__).parent / "double"))

from tensorrt_llm import SamplingParams
from tensorrt_llm.llmapi import KvCacheConfig
from trtllm_double.bench import (
    PROMPT,
    complete,
    make_engine,
    params,
    prepare_environment,
    ready_engine,
    sync,
    weights_of,
)
from trtllm_double.contract import CONTRACT, SAMPLING


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model_folder("llama", path)
    return path


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_environment(monkeypatch)


def test_greedy_tokens_are_those_of_transformers(folder: Path) -> None:
    async def scenario() -> None:
        output = await complete(await ready_engine(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = list(PROMPT)
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert output.token_ids == ids[len(PROMPT) :]
        assert sorted(vars(output)) == sorted(CONTRACT["output"]["outputs[i]"])

    asyncio.run(scenario())


def test_weights_of_the_folder_are_used_unless_dummy(folder: Path) -> None:
    async def scenario() -> None:
        loaded, synced = await make_engine(folder, load_format="auto"), await ready_engine(folder)
        assert (await complete(loaded)).token_ids == (await complete(synced)).token_ids

    asyncio.run(scenario())


def test_dummy_weights_do_not_generate(folder: Path) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder)
        with pytest.raises(RuntimeError, match="not complete"):
            llm.generate_async(PROMPT, params())

    asyncio.run(scenario())


def test_32_tokens_are_the_default(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        result = await llm.generate_async(PROMPT, SamplingParams(end_id=-1, detokenize=False))
        assert len(result.outputs[0].token_ids) == SAMPLING["defaults"]["max_tokens"]

    asyncio.run(scenario())


def test_context_ends_a_completion_by_length(folder: Path) -> None:
    async def scenario() -> None:
        output = await complete(await ready_engine(folder, max_seq_len=7), max_tokens=10)
        assert (len(output.token_ids), output.finish_reason) == (3, "length")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max_seq_len": 4}, "max_seq_len"), ({"max_input_len": 3}, "max_input_len"), ({"max_num_tokens": 3}, "max_num")],
)
def test_prompt_that_is_too_long_is_refused(folder: Path, limits: dict[str, int], reason: str) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder, **limits)
        with pytest.raises(ValueError, match=reason):
            llm.generate_async(PROMPT, params())

    asyncio.run(scenario())


def test_chunked_prefill_takes_prompts_beyond_max_num_tokens(folder: Path) -> None:
    async def scenario() -> None:
        output = await complete(await ready_engine(folder, max_num_tokens=3, enable_chunked_prefill=True))
        assert len(output.token_ids) == 6

    asyncio.run(scenario())


@pytest.mark.parametrize("prompt", [[], [64], [-1], [1.0], torch.tensor([3])], ids=str)
def test_what_is_no_prompt_is_refused(folder: Path, prompt: Any) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        with pytest.raises(ValueError, match="token ids"):
            llm.generate_async(prompt, params())

    asyncio.run(scenario())


@pytest.mark.parametrize(("changed", "reason"), [({"detokenize": True}, "detokenize"), ({"end_id": None}, "end_id")])
def test_what_needs_a_tokenizer_is_refused_without_one(folder: Path, changed: dict[str, Any], reason: str) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        with pytest.raises(ValueError, match=reason):
            llm.generate_async(PROMPT, params(**changed))

    asyncio.run(scenario())


def test_tokenizer_gives_end_tokens_and_text(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder, skip_tokenizer_init=False)
        given = SamplingParams(max_tokens=4)
        result = await llm.generate_async(PROMPT, given)
        assert {given.end_id, *given.stop_token_ids} == set(ENDS)
        assert result.outputs[0].text == AutoTokenizer.from_pretrained(folder).decode(result.outputs[0].token_ids)

    asyncio.run(scenario())


def test_requests_run_beside_each_other(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        long = llm.generate_async(PROMPT, params(max_tokens=50))
        short = await llm.generate_async(PROMPT, params(max_tokens=2))
        assert short.finished
        assert not long.finished
        assert len((await long).outputs[0].token_ids) == 50

    asyncio.run(scenario())


def test_max_batch_size_makes_requests_wait(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder, max_batch_size=1)
        long = llm.generate_async(PROMPT, params(max_tokens=20))
        await llm.generate_async(PROMPT, params(max_tokens=1))
        assert long.finished

    asyncio.run(scenario())


def test_abort_returns_what_there_is(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        long = llm.generate_async(PROMPT, params(max_tokens=1000, logprobs=0))
        await llm.generate_async(PROMPT, params(max_tokens=5))
        long.abort()
        output = (await long).outputs[0]
        assert long.aborted()
        assert output.finish_reason == "cancelled"
        assert 1 < len(output.token_ids) == len(output.logprobs) < 1000

    asyncio.run(scenario())


def test_pause_aborts_and_refuses_until_resumed(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        long = llm.generate_async(PROMPT, params(max_tokens=1000))
        await llm.pause_generation()
        assert long.outputs[0].finish_reason == "cancelled"
        with pytest.raises(RuntimeError, match="resume_generation"):
            llm.generate_async(PROMPT, params())
        await llm.resume_generation()
        assert len((await complete(llm)).token_ids) == 6

    asyncio.run(scenario())


def test_equal_prompts_share_a_cache_until_it_is_reset(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        before = await complete(llm, logprobs=0, logprobs_simple_format=True)
        await sync(llm, weights_of(folder, factor=0.7))
        stale = await complete(llm, logprobs=0, logprobs_simple_format=True)
        assert stale.logprobs[0] == before.logprobs[0]
        await llm.collective_rpc("reset_prefix_cache")
        reset = await complete(llm, logprobs=0, logprobs_simple_format=True)
        assert reset.logprobs[0] != before.logprobs[0]

    asyncio.run(scenario())


def test_without_block_reuse_nothing_is_stale(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder, kv_cache_config=KvCacheConfig(enable_block_reuse=False))
        before = await complete(llm, logprobs=0, logprobs_simple_format=True)
        await sync(llm, weights_of(folder, factor=0.7))
        after = await complete(llm, logprobs=0, logprobs_simple_format=True)
        assert after.logprobs[0] != before.logprobs[0]

    asyncio.run(scenario())
