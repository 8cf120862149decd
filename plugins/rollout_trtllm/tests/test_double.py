"""The double of TensorRT-LLM: its names are the contract's, and it refuses a wrong start."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path

import pytest
import torch

from rlplug.testing.models import make_model_folder

sys.path.insert(0, str(Path(__file__).parent / "double"))

import tensorrt_llm
from tensorrt_llm import AsyncLLM
from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension
from trtllm_double import calls, clear_calls
from trtllm_double.bench import PROMPT, complete, make_engine, params, prepare_environment, ready_engine
from trtllm_double.contract import CONTRACT, LLM


class Extension(WorkerExtension):
    """A worker extension of a plugin."""

    def rank_and_device(self, more: int = 0) -> tuple[int, int, int]:
        return self.global_rank, self.device_id, more


class Conflicting(WorkerExtension):
    """One that defines what workers have."""

    def sleep(self) -> None:
        """Do nothing."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model_folder("llama", path)
    return path


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_environment(monkeypatch)
    monkeypatch.setitem(sys.modules, "double_extensions", sys.modules[__name__])
    clear_calls()


# ---- surface --------------------------------------------------------------------------------------------------------


def test_modules_have_the_names_of_the_contract() -> None:
    for module, names in CONTRACT["imports"].items():
        assert [name for name in names if not hasattr(importlib.import_module(module), name)] == []


def test_version_is_of_the_contracts_line() -> None:
    assert tensorrt_llm.__version__.startswith("1.3.")


def test_configurations_have_the_contracts_defaults() -> None:
    assert vars(KvCacheConfig()) == CONTRACT["KvCacheConfig"]


def test_methods_have_the_contracts_parameters() -> None:
    for name, method in CONTRACT["methods"].items():
        code = getattr(AsyncLLM, name).__code__
        expected = [
            parameter.partition("=")[0] for parameter in (*method.get("params", []), *method.get("optional", []))
        ]
        assert code.co_varnames[1 : code.co_argcount] == tuple(expected), name


# ---- start ----------------------------------------------------------------------------------------------------------


def test_positional_model_is_refused(folder: Path) -> None:
    with pytest.raises(TypeError, match="positional"):
        AsyncLLM(str(folder))


@pytest.mark.parametrize("keyword", [*LLM["forbidden"], "gpu_memory_utilization", "orchestrator_type"])
def test_keyword_that_is_not_allowed_is_named(folder: Path, keyword: str) -> None:
    with pytest.raises(ValueError, match=keyword):
        make_engine(folder, **{keyword: True})


def test_every_allowed_keyword_is_taken(folder: Path) -> None:
    has_no_none = {"model", "backend", "dtype", "load_format", "ray_worker_extension_cls"}
    given = {key: None for key in LLM["kwargs_allowed"] if key not in has_no_none}
    placed = {"placement_groups": ["group"], "placement_bundle_indices": [[0]], "per_worker_gpu_share": 0.5}
    make_engine(folder, backend="pytorch", **given, **placed)


def test_unknown_keyword_of_a_configuration_is_refused() -> None:
    with pytest.raises(TypeError, match="block_reuse"):
        KvCacheConfig(block_reuse=True)


def test_wrong_type_in_a_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match="enable_block_reuse"):
        KvCacheConfig(enable_block_reuse="yes")


def test_configuration_of_another_class_is_refused(folder: Path) -> None:
    with pytest.raises(TypeError, match="kv_cache_config"):
        make_engine(folder, kv_cache_config=CudaGraphConfig())


def test_another_backend_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="backend"):
        make_engine(folder, backend="tensorrt")


def test_bundles_for_another_number_of_workers_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="each of 2 workers"):
        make_engine(folder, placement_groups=["a"], placement_bundle_indices=[[0]], tensor_parallel_size=2)


@pytest.mark.parametrize("name", ["PMI_RANK", "PMIX_ID", "MPI_X", "OMPI_COMM_WORLD_RANK", "SLURM_JOB_ID"])
def test_variables_of_mpi_and_slurm_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(RuntimeError, match=name):
        make_engine(folder)


@pytest.mark.parametrize("setting", CONTRACT["environment"]["set"])
def test_missing_variable_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.delenv(setting.partition("=")[0])
    with pytest.raises(RuntimeError, match=setting):
        make_engine(folder)


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("no_such_module.Extension", RuntimeError, "no_such_module"),
        ("double_extensions.Missing", RuntimeError, "Missing"),
        ("double_extensions.Path", TypeError, "no subclass"),
        ("double_extensions.Conflicting", ValueError, "sleep"),
    ],
)
def test_extension_that_workers_cannot_have_is_refused(
    folder: Path, name: str, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        make_engine(folder, ray_worker_extension_cls=name)


def test_global_random_generator_is_left_alone(folder: Path) -> None:
    async def scenario() -> None:
        before = torch.get_rng_state()
        await complete(await ready_engine(folder), temperature=1.0, seed=3)
        assert torch.equal(before, torch.get_rng_state())

    asyncio.run(scenario())


def test_calls_before_setup_are_refused(folder: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="setup_async"):
            make_engine(folder).generate_async(PROMPT, params())

    asyncio.run(scenario())


def test_awaiting_an_engine_sets_it_up_once(folder: Path) -> None:
    async def scenario() -> None:
        llm = make_engine(folder)
        assert await llm is llm
        assert await llm.setup_async() is llm
        assert [name for name, _ in calls] == ["AsyncLLM", "setup_async"]

    asyncio.run(scenario())


def test_calls_after_shutdown_are_refused(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        llm.shutdown()
        llm.shutdown()
        for call in (llm.setup_async, llm.pause_generation, lambda: llm.release(["kv_cache"])):
            with pytest.raises(RuntimeError, match="shut down"):
                await call()
        with pytest.raises(RuntimeError, match="shut down"):
            llm.generate_async(PROMPT, params())

    asyncio.run(scenario())


def test_shutdown_ends_what_runs(folder: Path) -> None:
    async def scenario() -> None:
        llm = await ready_engine(folder)
        running = llm.generate_async(PROMPT, params(max_tokens=1000))
        llm.shutdown()
        with pytest.raises(RuntimeError, match="shut down"):
            await running

    asyncio.run(scenario())


# ---- calls of workers -----------------------------------------------------------------------------------------------


def test_methods_of_the_extension_run_on_every_worker(folder: Path) -> None:
    async def scenario() -> None:
        extension = "double_extensions.Extension"
        llm = await make_engine(folder, tensor_parallel_size=2, ray_worker_extension_cls=extension)
        assert await llm.collective_rpc("rank_and_device", (4,)) == [(0, 0, 4), (1, 1, 4)]
        assert await llm.collective_rpc("rank_and_device", unique_reply_rank=1) == [(1, 1, 0)]
        assert await llm.collective_rpc("rank_and_device", kwargs={"more": 2}, target_ranks=[0]) == [(0, 0, 2)]
        assert await llm.collective_rpc("report_device_id") == ["GPU-double-0", "GPU-double-1"]

    asyncio.run(scenario())


def test_unknown_method_of_workers_is_refused(folder: Path) -> None:
    async def scenario() -> None:
        llm = await make_engine(folder)
        with pytest.raises(AttributeError, match="flush_cache"):
            await llm.collective_rpc("flush_cache")

    asyncio.run(scenario())
