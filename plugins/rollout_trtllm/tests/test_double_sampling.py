"""The double of TensorRT-LLM: what it draws, and what it says of that."""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlplug.testing.models import MAX_CONTEXT, make_model_folder

sys.path.insert(0, str(Path(__file__).parent / "double"))

from tensorrt_llm import SamplingParams
from trtllm_double.bench import PROMPT, complete, params, prepare_environment, ready_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model_folder("llama", path)
    return path


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_environment(monkeypatch)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"top_k": -1}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"temperature": -0.1}, "temperature"),
        ({"n": 2}, "multiple returns"),
        ({"n": 2, "temperature": 0.0}, "multiple returns"),
        ({"n": 2, "top_k": 1}, "multiple returns"),
        ({"logprobs": 1, "logprobs_simple_format": True}, "logprobs == 0"),
        ({"logprobs_simple_format": True}, "logprobs == 0"),
        ({"logprobs": 0, "logprobs_mode": "PROCESSED"}, "PROCESSED"),
        ({"seed": -3}, "seed"),
    ],
    ids=str,
)
def test_sampling_that_the_engine_refuses(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SamplingParams(**given)


def test_unknown_field_of_sampling_is_refused() -> None:
    with pytest.raises(TypeError, match="max_new_tokens"):
        SamplingParams(max_new_tokens=3)


def test_sampling_of_another_class_is_refused(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        with pytest.raises(TypeError, match="SamplingParams"):
            llm.generate_async(PROMPT, {"max_tokens": 3})

    asyncio.run(scenario())


@pytest.mark.parametrize("given", [{}, {"temperature": 0.0}, {"top_k": 1, "temperature": 1.0}, {"top_p": 0.0}], ids=str)
def test_greedy(folder: Path, given: dict[str, Any]) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        first, again = await complete(llm, **given, seed=1), await complete(llm, **given, seed=2)
        assert first.token_ids == again.token_ids == (await complete(llm, logprobs=1)).token_ids

    asyncio.run(scenario())


def test_seed_decides_the_tokens(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        sampled = {"temperature": 1.0, "max_tokens": 12}
        first, again, other = [(await complete(llm, **sampled, seed=seed)).token_ids for seed in (7, 7, 8)]
        assert first == again
        assert first != other

    asyncio.run(scenario())


def test_several_completions_of_a_request_differ(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        result = await llm.generate_async(PROMPT, params(n=3, temperature=1.0, seed=5, max_tokens=12))
        assert [output.index for output in result.outputs] == [0, 1, 2]
        assert len({tuple(output.token_ids) for output in result.outputs}) == 3

    asyncio.run(scenario())


def logits_after_prompt(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(torch.tensor([PROMPT])).logits[0, -1].detach().double()


def test_raw_logprobs_are_before_temperature(folder: Path) -> None:
    async def scenario() -> None:
        output = await complete(
            await ready_engine(folder), temperature=0.5, seed=1, logprobs=0, logprobs_simple_format=True
        )
        expected = logits_after_prompt(folder).log_softmax(-1)[output.token_ids[0]]
        assert output.logprobs[0] == pytest.approx(float(expected), abs=1e-5)

    asyncio.run(scenario())


def test_processed_logprobs_are_of_what_is_drawn_from(folder: Path) -> None:
    async def scenario() -> None:
        given = {"temperature": 0.5, "top_k": 3, "seed": 1, "logprobs": 0, "logprobs_simple_format": True}
        output = await complete(await ready_engine(folder), **given, logprobs_mode="processed")
        top = (logits_after_prompt(folder) / 0.5).topk(3)
        expected = top.values.log_softmax(-1)[top.indices.tolist().index(output.token_ids[0])]
        assert output.logprobs[0] == pytest.approx(float(expected), abs=1e-5)

    asyncio.run(scenario())


def test_processed_logprob_of_greedy_says_nothing(folder: Path) -> None:
    async def scenario() -> None:
        output = await complete(await ready_engine(folder), logprobs=0, logprobs_mode="processed")
        assert [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)] == [
            0.0
        ] * 6

    asyncio.run(scenario())


def test_first_of_several_logprobs_is_not_always_the_sampled(folder: Path) -> None:
    async def scenario() -> None:
        output = await complete(await ready_engine(folder), temperature=5.0, seed=2, logprobs=2, max_tokens=40)
        outside = 0
        for token, entry in zip(output.token_ids, output.logprobs, strict=True):
            ranks = [logprob.rank for logprob in entry.values()]
            assert ranks[:2] == [1, 2]
            assert token in entry
            if len(entry) == 3:
                outside += 1
                assert list(entry)[-1] == token
        assert outside > 10

    asyncio.run(scenario())


def test_top_k_and_top_p_bound_what_is_drawn(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        sampled = {"temperature": 2.0, "top_k": 6, "top_p": 0.8, "max_tokens": 1}
        drawn = {(await complete(llm, **sampled, seed=seed)).token_ids[0] for seed in range(300)}
        top = (logits_after_prompt(folder) / 2.0).topk(6)
        shares = top.values.softmax(-1).numpy()
        kept = int((numpy.cumsum(shares) - shares < 0.8).sum())
        assert drawn == set(top.indices[:kept].tolist())

    asyncio.run(scenario())


def test_end_id_stays_and_stop_tokens_are_cut_off(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        tokens = (await complete(llm)).token_ids
        end = next(token for token in tokens if token != tokens[0])
        until = tokens[: tokens.index(end) + 1]
        by_end_id = await complete(llm, end_id=end)
        cut = await complete(llm, stop_token_ids=[end], logprobs=0)
        kept = await complete(llm, stop_token_ids=[end], include_stop_str_in_output=True)
        assert (by_end_id.token_ids, by_end_id.finish_reason, by_end_id.stop_reason) == (until, "stop", None)
        assert (cut.token_ids, cut.finish_reason, cut.stop_reason) == (until[:-1], "stop", end)
        assert len(cut.logprobs) == len(until)
        assert kept.token_ids == until

    asyncio.run(scenario())


def test_ignore_eos_ignores_all_ends(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        tokens = (await complete(llm)).token_ids
        output = await complete(llm, end_id=tokens[0], stop_token_ids=[tokens[1]], ignore_eos=True)
        assert (output.token_ids, output.finish_reason) == (tokens, "length")

    asyncio.run(scenario())


def test_logprobs_that_are_not_asked_for_are_absent(folder: Path) -> None:
    async def scenario() -> None:
        assert (await complete(await ready_engine(folder))).logprobs == []

    asyncio.run(scenario())


def test_logprobs_are_finite_at_the_end_of_the_context(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        prompt = [3 + index % 50 for index in range(MAX_CONTEXT - 2)]
        output = await complete(llm, prompt, logprobs=0, logprobs_simple_format=True)
        assert len(output.token_ids) == 2
        assert all(math.isfinite(logprob) for logprob in output.logprobs)

    asyncio.run(scenario())
