"""The double of TensorRT-LLM: memory that is released and resumed. Of the contract: ``SleepConfig`` and ``order``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from rlplug.testing.models import make_model_folder

sys.path.insert(0, str(Path(__file__).parent / "double"))

from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType, SleepConfig
from trtllm_double import calls, clear_calls
from trtllm_double.bench import (
    PROMPT,
    complete,
    make_engine,
    params,
    payload,
    prepare_environment,
    ready_engine,
    sync,
    weights_of,
)
from trtllm_double.contract import CONTRACT

ALL = CONTRACT["ExecutorMemoryType"]
LATE = ["kv_cache"]
EARLY = [tag for tag in ALL if tag not in LATE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model_folder("llama", path)
    return path


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_environment(monkeypatch)


def test_order_of_the_contract_is_taken_and_noted(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        weights = weights_of(folder)
        first = (await complete(llm)).token_ids
        clear_calls()
        await llm.release(ALL)
        await llm.resume(EARLY)
        await sync(llm, weights)
        await llm.resume(LATE)
        assert (await complete(llm)).token_ids == first
        assert calls == [
            ("release", tuple(ALL)),
            ("resume", tuple(EARLY)),
            ("update_weights", tuple(weights)),
            ("update_weights", None),
            ("resume", ("kv_cache",)),
            ("generate_async", len(PROMPT)),
        ]

    asyncio.run(scenario())


def test_members_of_memory_types_are_those_of_the_sources() -> None:
    assert ExecutorMemoryType.MODEL_WEIGHTS_MAIN == "model_weights"
    assert ExecutorMemoryType.MODEL_ENGINE_MAIN == "model"
    assert [member.value for member in ExecutorMemoryType] == ALL


def test_release_without_sleep_config_is_refused(folder: Path) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder, sleep_config=None)
        with pytest.raises(RuntimeError, match="sleep_config"):
            await llm.release(ALL)

    asyncio.run(scenario())


@pytest.mark.parametrize(("modes", "reason"), [({"weights": "NONE"}, "weights"), ({"model": "DISK"}, "DISK")])
def test_unknown_restore_modes_are_refused(modes: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SleepConfig(restore_modes=modes)


@pytest.mark.parametrize(("tags", "error"), [(["weights"], ValueError), ("kv_cache", TypeError), ([], TypeError)])
def test_unknown_tags_are_refused(folder: Path, tags: Any, error: type[Exception]) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder)
        with pytest.raises(error, match="tags"):
            await llm.release(tags)

    asyncio.run(scenario())


def test_release_while_requests_run_is_refused(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        running = llm.generate_async(PROMPT, params(max_tokens=40))
        with pytest.raises(RuntimeError, match="1 requests run"):
            await llm.release(["kv_cache"])
        await running
        await llm.release(["kv_cache"])

    asyncio.run(scenario())


def test_release_twice_is_refused(folder: Path) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder)
        await llm.release(["kv_cache"])
        with pytest.raises(RuntimeError, match=r"kv_cache.*released already"):
            await llm.release(ALL)

    asyncio.run(scenario())


def test_resume_of_what_is_not_released_is_refused(folder: Path) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder)
        await llm.release(["model_weights"])
        with pytest.raises(RuntimeError, match=r"kv_cache.*not released"):
            await llm.resume(["model_weights", "kv_cache"])

    asyncio.run(scenario())


@pytest.mark.parametrize("tag", ALL)
def test_generation_while_memory_is_released_is_refused(folder: Path, tag: str) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        await llm.release([tag])
        with pytest.raises(RuntimeError, match=tag):
            llm.generate_async(PROMPT, params())

    asyncio.run(scenario())


def test_released_weights_are_lost(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        await llm.release(["model_weights"])
        await llm.resume(["model_weights"])
        with pytest.raises(RuntimeError, match="not complete"):
            llm.generate_async(PROMPT, params())
        await sync(llm, weights_of(folder))
        assert (await complete(llm)).token_ids

    asyncio.run(scenario())


def test_weights_that_are_restored_are_kept(folder: Path) -> None:
    async def scenario() -> None:
        kept = SleepConfig(restore_modes={ExecutorMemoryType.MODEL_WEIGHTS_MAIN: "PINNED"})
        llm = await ready_engine(folder, sleep_config=kept)
        before = (await complete(llm)).token_ids
        await llm.release(ALL)
        await llm.resume(ALL)
        assert (await complete(llm)).token_ids == before

    asyncio.run(scenario())


def test_release_of_the_kv_cache_forgets_prompts(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        before = await complete(llm, logprobs=0, logprobs_simple_format=True)
        await llm.release(["kv_cache"])
        await sync(llm, weights_of(folder, factor=0.7))
        await llm.resume(["kv_cache"])
        after = await complete(llm, logprobs=0, logprobs_simple_format=True)
        assert after.logprobs[0] != before.logprobs[0]

    asyncio.run(scenario())


def test_weights_cannot_come_while_their_memory_is_released(folder: Path) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder)
        await llm.release(ALL)
        await llm.resume(["kv_cache"])
        with pytest.raises(RuntimeError, match=r"model_weights.*resume them first"):
            await llm.update_weights(payload(weights_of(folder)))

    asyncio.run(scenario())
