"""The double of TensorRT-LLM: buckets of weights and the end of a sync. Of the contract: ``wire`` and ``rpc``."""

from __future__ import annotations

import asyncio
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlplug.testing.models import make_model_folder

sys.path.insert(0, str(Path(__file__).parent / "double"))

from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension
from trtllm_double import handles
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
from trtllm_double.contract import CONTRACT
from trtllm_double.handles import reduce_tensor


class Receiver(WorkerExtension):
    """An extension that gets weights by a way of its own."""

    def receive(self, weights: dict[str, torch.Tensor], is_partial: bool) -> None:
        model_engine = self.engine.model_engine
        model_engine.model_loader.reload(model_engine.model, weights, allow_partial_loading=is_partial)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model_folder("llama", path)
    return path


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2")
    make_model_folder("qwen2", path)
    return path


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_environment(monkeypatch)
    monkeypatch.setitem(sys.modules, "double_receivers", sys.modules[__name__])


# ---- a sync and its end ---------------------------------------------------------------------------------------------


def test_buckets_make_a_sync(folder: Path) -> None:
    async def scenario() -> None:
        llm, other = await make_engine(folder), await ready_engine(folder)
        for item in weights_of(folder).items():
            await llm.update_weights(payload([item]))
        await llm.update_weights(None)
        assert (await complete(llm)).token_ids == (await complete(other)).token_ids

    asyncio.run(scenario())


def test_generation_before_the_finalisation_is_refused(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        await llm.update_weights(payload(weights_of(folder)))
        with pytest.raises(RuntimeError, match="not finalised"):
            llm.generate_async(PROMPT, params())

    asyncio.run(scenario())


def test_missing_weights_are_refused_at_the_finalisation(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        weights = weights_of(folder)
        weights.pop("model.norm.weight")
        await llm.update_weights(payload(weights))
        with pytest.raises(RuntimeError, match=r"1 weights are missing.*model\.norm\.weight"):
            await llm.update_weights(None)
        with pytest.raises(RuntimeError, match="not complete"):
            llm.generate_async(PROMPT, params())
        await sync(llm, weights_of(folder))
        assert (await complete(llm)).token_ids

    asyncio.run(scenario())


def test_finalisation_without_a_bucket_is_refused(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        with pytest.raises(RuntimeError, match="without a bucket"):
            await llm.update_weights(None)

    asyncio.run(scenario())


def test_weights_of_a_sync_that_broke_off_do_not_count(folder: Path) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder)
        weights = weights_of(folder)
        await llm.update_weights(payload(weights))
        again = dict(weights)
        again.pop("model.norm.weight")
        await llm.update_weights(payload(again))
        with pytest.raises(RuntimeError, match="missing"):
            await llm.update_weights(None)

    asyncio.run(scenario())


def test_update_waits_for_requests(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        running = llm.generate_async(PROMPT, params(max_tokens=30))
        await llm.update_weights(payload(weights_of(folder)))
        assert running.finished
        assert len((await running).outputs[0].token_ids) == 30

    asyncio.run(scenario())


def test_handles_are_dropped_at_the_finalisation(folder: Path) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder)
        before = handles.num_open()
        weights = weights_of(folder)
        await llm.update_weights(payload(weights))
        assert handles.num_open() == before + len(weights)
        await llm.update_weights(None)
        assert handles.num_open() == before

    asyncio.run(scenario())


# ---- names and tensors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("model.norm.wieght", torch.ones(128), "no such parameter"),
        ("model.norm.weight", torch.ones(64), "shape"),
        ("model.norm.weight", torch.ones(128, dtype=torch.bfloat16), "bfloat16"),
        ("model.norm.weight_scale_inv", torch.ones(1, 1), "no such parameter"),
        ("lm_head.weight", torch.ones(64, 128).to(torch.float8_e4m3fn), "FP8"),
    ],
)
def test_weight_that_does_not_fit_is_named(folder: Path, name: str, tensor: torch.Tensor, reason: str) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder)
        with pytest.raises(ValueError, match=f"{name}.*{reason}"):
            await llm.update_weights(payload([(name, tensor)]))
        with pytest.raises(RuntimeError, match="not finalised"):
            llm.generate_async(PROMPT, params())

    asyncio.run(scenario())


def test_tied_weight_comes_under_its_first_name(tied_folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(tied_folder)
        embedding = weights_of(tied_folder)["model.embed_tokens.weight"]
        with pytest.raises(ValueError, match=r"lm_head\.weight.*first name"):
            await llm.update_weights(payload([("lm_head.weight", embedding)]))

    asyncio.run(scenario())


# ---- the wire -------------------------------------------------------------------------------------------------------


async def refused(llm: Any, weights: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        await llm.update_weights(weights)


def test_unknown_uuid_is_refused(folder: Path) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder)
        await refused(llm, payload(weights_of(folder), num_workers=2), ValueError, "GPU-double-1")

    asyncio.run(scenario())


def test_worker_without_a_payload_is_refused(folder: Path) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder, tensor_parallel_size=2)
        await refused(llm, payload(weights_of(folder)), RuntimeError, "GPU-double-1")

    asyncio.run(scenario())


def test_every_worker_needs_the_same_weights(folder: Path) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder, tensor_parallel_size=2)
        weights = weights_of(folder)
        await sync(llm, weights, num_workers=2)
        other = payload(weights_of(folder, factor=0.5), num_workers=2)
        mixed = payload(weights, num_workers=2) | {"GPU-double-1": other["GPU-double-1"]}
        await refused(llm, mixed, RuntimeError, "worker 1 got other weights")
        fewer = payload(dict(list(weights.items())[:3]), num_workers=2)
        mixed = payload(weights, num_workers=2) | {"GPU-double-1": fewer["GPU-double-1"]}
        await refused(llm, mixed, RuntimeError, "worker 1 got other weights")

    asyncio.run(scenario())


def test_update_of_some_workers_is_refused(folder: Path) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder, tensor_parallel_size=2)
        weights = payload(weights_of(folder), num_workers=2)
        with pytest.raises(RuntimeError, match="worker 1"):
            await llm.collective_rpc("update_weights", (weights,), target_ranks=[0])
        await llm.update_weights(payload(weights_of(folder), num_workers=2))
        with pytest.raises(RuntimeError, match=r"workers \[0\] of 2"):
            await llm.collective_rpc("update_weights", (None,), target_ranks=0)

    asyncio.run(scenario())


def test_tensor_that_is_used_again_is_refused(folder: Path) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder)
        norm = torch.ones(128)
        sent = {"GPU-double-0": encode([("model.norm.weight", reduce_tensor(norm))])}
        norm.fill_(float("nan"))
        await refused(llm, sent, RuntimeError, r"model\.norm\.weight: re-used tensor")

    asyncio.run(scenario())


def test_handle_is_opened_once_by_a_worker(folder: Path) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder)
        sent = payload([("model.norm.weight", torch.ones(128))])
        await llm.update_weights(sent)
        await refused(llm, sent, RuntimeError, "opened this handle before")

    asyncio.run(scenario())


def test_handle_of_a_former_sync_is_refused(folder: Path) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder)
        sent = payload(weights_of(folder))
        await llm.update_weights(sent)
        await llm.update_weights(None)
        await refused(llm, sent, RuntimeError, "unknown handle")

    asyncio.run(scenario())


class Foreign:
    """What the restricted unpickler must not load."""

    def __reduce__(self) -> Any:
        return Path, ("/",)


@pytest.mark.parametrize("item", [Foreign(), torch.ones(2)], ids=["another module", "the bytes of a tensor"])
def test_other_globals_are_not_unpickled(folder: Path, item: Any) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder)
        await refused(llm, {"GPU-double-0": encode([("name", item)])}, pickle.UnpicklingError, "may not be loaded")

    asyncio.run(scenario())


def cut_short() -> Any:
    func, args = reduce_tensor(torch.ones(1))
    return func, args[:6]


@pytest.mark.parametrize(
    ("sent", "error", "reason"),
    [
        (b"bytes", TypeError, "base64 text"),
        ("no base64!", ValueError, "no base64"),
        (encode({"name": 1}), ValueError, "pickled list"),
        (encode([("name", 1)]), ValueError, "instead of"),
        (encode([("name", (print, (1,)))]), ValueError, "rebuild"),
        (encode([("name", cut_short())]), ValueError, "6 arguments"),
        (encode([("name", reduce_tensor(torch.ones(1)))] * 2), ValueError, "twice"),
    ],
    ids=["bytes", "text", "no list", "no handle", "another callable", "few arguments", "twice"],
)
def test_payload_of_another_form_is_refused(folder: Path, sent: Any, error: type[Exception], reason: str) -> None:
    async def scenario() -> None:
        await refused(await make_engine(folder), {"GPU-double-0": sent}, error, reason)

    asyncio.run(scenario())


def test_stand_in_has_the_form_of_cuda_handles() -> None:
    func, args = reduce_tensor(torch.ones(3))
    code = func.__code__
    assert (func.__name__, code.co_varnames[6]) == ("rebuild_cuda_tensor", "storage_device")
    assert len(args) == code.co_argcount > CONTRACT["wire"]["len_args_gt"]


# ---- extensions that receive weights --------------------------------------------------------------------------------


def test_extension_may_load_weights_by_itself(folder: Path) -> None:
    async def scenario() -> None:
        given = {"tensor_parallel_size": 2, "ray_worker_extension_cls": "double_receivers.Receiver"}
        llm, other = await make_engine(folder, **given), await ready_engine(folder)
        await llm.collective_rpc("receive", (weights_of(folder), False))
        with pytest.raises(RuntimeError, match="not finalised"):
            llm.generate_async(PROMPT, params())
        await llm.update_weights(None)
        assert (await complete(llm)).token_ids == (await complete(other)).token_ids

    asyncio.run(scenario())


def test_partial_loading_must_be_asked_for(folder: Path) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder, ray_worker_extension_cls="double_receivers.Receiver")
        one = {"model.norm.weight": torch.ones(128)}
        await llm.collective_rpc("receive", (one, True))
        with pytest.raises(RuntimeError, match="allow_partial_loading"):
            await llm.collective_rpc("receive", (one, False))

    asyncio.run(scenario())


def test_extension_cannot_load_while_requests_run(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder, ray_worker_extension_cls="double_receivers.Receiver")
        running = llm.generate_async(PROMPT, params(max_tokens=200))
        with pytest.raises(RuntimeError, match="requests run"):
            await llm.collective_rpc("receive", (weights_of(folder), False))
        running.abort()
        await running

    asyncio.run(scenario())
