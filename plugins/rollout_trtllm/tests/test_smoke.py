"""The surface that the plugin names, compared with the contract and with the double; and what the command says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import on_double  # noqa: F401 - it makes the double importable
import pytest
import torch
from ray_stand_in import Cluster
from rlplug_rollout_trtllm import smoke, surface

CONTRACT = json.loads((Path(__file__).parent / "trtllm_contract.json").read_text())


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(gpus=1).install(monkeypatch)
    import ray

    monkeypatch.setattr(ray, "__version__", "2.50.0", raising=False)


def changed(monkeypatch: pytest.MonkeyPatch, module: str, name: str, value: Any) -> list[str]:
    """Return the differences of an engine in which one thing is another."""
    monkeypatch.setattr(importlib.import_module(module), name, value)
    return surface.differences()


# ---- the copy of the contract ---------------------------------------------------------------------------------------


def test_the_symbols_are_the_contracts() -> None:
    listed = {module: set(names) for module, names in CONTRACT["imports"].items()}
    assert all(set(names) <= listed[module] for module, names in surface.SYMBOLS.items())


def test_the_arguments_are_the_contracts() -> None:
    about = CONTRACT["AsyncLLM.__init__"]
    assert set(about["kwargs_allowed"]) == surface.LLM_ARGS
    assert list(surface.PLACING) == about["named"]


def test_the_methods_are_the_contracts() -> None:
    methods = CONTRACT["methods"]
    assert set(surface.METHODS) - {"shutdown"} == set(methods)  # that one is of every LLM
    for name, parameters in surface.METHODS.items():
        known = {each.partition("=")[0] for each in methods.get(name, {}).get("params", [])}
        assert set(parameters) <= known, name


def test_fields_and_defaults_are_the_contracts() -> None:
    assert set(surface.SAMPLING) <= set(CONTRACT["SamplingParams"]["fields"])
    assert surface.DEFAULTS["SamplingParams"] == CONTRACT["SamplingParams"]["defaults"]
    assert surface.DEFAULTS["KvCacheConfig"] == CONTRACT["KvCacheConfig"]
    assert list(surface.CUDA_GRAPHS) == CONTRACT["CudaGraphConfig"]
    assert set(surface.MEMORY_TYPES) <= set(CONTRACT["ExecutorMemoryType"])


# ---- differences ----------------------------------------------------------------------------------------------------


def test_the_double_has_all_of_it() -> None:
    assert surface.differences() == []


def test_a_missing_symbol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(importlib.import_module("tensorrt_llm.llmapi"), "CudaGraphConfig")
    assert surface.differences() == ["tensorrt_llm.llmapi has no CudaGraphConfig"]


def test_a_missing_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = importlib.import_module("tensorrt_llm").AsyncLLM
    monkeypatch.delattr(engine, "pause_generation")
    assert surface.differences() == ["AsyncLLM has no method pause_generation"]


def test_a_missing_keyword_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def release(self: Any, kinds: Any) -> None: ...

    engine = importlib.import_module("tensorrt_llm").AsyncLLM
    monkeypatch.setattr(engine, "release", release)
    assert surface.differences() == ["AsyncLLM.release takes no 'tags'"]


def test_a_missing_argument_is_named_where_the_engine_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class TorchLlmArgs:
        model_fields = dict.fromkeys(surface.LLM_ARGS - {"model_kwargs"})

    arguments = importlib.import_module("tensorrt_llm.llmapi.llm_args")
    monkeypatch.setattr(arguments, "TorchLlmArgs", TorchLlmArgs, raising=False)
    assert surface.differences() == ["AsyncLLM takes no argument 'model_kwargs'"]


def test_a_missing_field_and_a_changed_default_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class KvCacheConfig:
        def __init__(
            self, enable_block_reuse: bool = False, free_gpu_memory_fraction: float = 0.9, dtype: str = "auto"
        ):
            self.enable_block_reuse = enable_block_reuse

    found = changed(monkeypatch, "tensorrt_llm.llmapi", "KvCacheConfig", KvCacheConfig)
    assert found == [
        "KvCacheConfig has no field 'tokens_per_block'",
        "KvCacheConfig.enable_block_reuse is False by default, and was True",
    ]


def test_a_missing_memory_type_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType

    others = [member for member in ExecutorMemoryType if member.value != "model_weights"]
    found = changed(monkeypatch, "tensorrt_llm.llmapi.llm_args", "ExecutorMemoryType", others)
    assert found == ["ExecutorMemoryType has no 'model_weights'"]


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_surface_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.main(["--surface-only"]) == 0
    assert "0 differences" in capsys.readouterr().out


def test_a_difference_is_printed_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delattr(importlib.import_module("tensorrt_llm").AsyncLLM, "resume")
    assert smoke.main(["--surface-only"]) == 1
    assert "differs: AsyncLLM has no method resume" in capsys.readouterr().out


def test_without_the_engine_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(importlib.import_module("sys").modules, "tensorrt_llm", None)
    assert smoke.main([]) == 1
    assert "NVIDIA's TensorRT-LLM container" in capsys.readouterr().out


def test_without_a_gpu_the_kit_is_not_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert smoke.main([]) == 1
    assert "the conformance kit was not run" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1)])
def test_the_kit_decides_on_a_gpu(monkeypatch: pytest.MonkeyPatch, code: int, expected: int) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(pytest, "main", lambda arguments: given.append(arguments) or code)
    monkeypatch.setenv(smoke.MODEL_VARIABLE, "")
    assert smoke.main(["--model", "folder"]) == expected
    assert Path(given[0][-1]).name == "smoke_checks.py"
    assert Path(given[0][-1]).is_file()


def test_help_says_what_exit_codes_mean(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        smoke.main(["--help"])
    assert "Exit code 0" in capsys.readouterr().out
