"""The names that the plugin uses, compared with the contract and with the double; and what the smoke command says."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import on_double  # noqa: F401 - it makes the double importable
import pytest
import torch
from ray_stand_in import Cluster
from rlplug_rollout_trtllm import smoke, surface

ASYNC_LLM = surface.SYMBOLS["tensorrt_llm"]["AsyncLLM"]
METHODS = [member for member in ASYNC_LLM if member.endswith(")")]
MEMORY_TYPES = surface.SYMBOLS["tensorrt_llm.llmapi.llm_args"]["ExecutorMemoryType"]
CONTRACT = json.loads((Path(__file__).parent / "trtllm_contract.json").read_text())


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(gpus=1).install(monkeypatch)
    monkeypatch.setattr(importlib.import_module("ray"), "__version__", "2.50.0", raising=False)


def test_the_names_are_the_contracts() -> None:
    listed, engine, methods = CONTRACT["imports"], CONTRACT["AsyncLLM.__init__"], CONTRACT["methods"]
    assert all(set(names) <= set(listed[module]) for module, names in surface.SYMBOLS.items())
    assert set(engine["kwargs_allowed"]) == surface.LLM_ARGS
    assert list(surface.PLACING) == engine["named"] == [member for member in ASYNC_LLM if member not in METHODS]
    named = dict(method.rstrip(")").split("(") for method in METHODS)
    assert named.keys() - {"shutdown"} == set(methods)  # that one is of every LLM
    for name, parameters in named.items():
        known = {each.partition("=")[0] for each in methods.get(name, {}).get("params", [])}
        assert {each for each in parameters.split(", ") if each} <= known, name
    assert set(surface.SYMBOLS["tensorrt_llm"]["SamplingParams"]) <= set(CONTRACT["SamplingParams"]["fields"])
    assert surface.DEFAULTS["SamplingParams"] == CONTRACT["SamplingParams"]["defaults"]
    assert surface.DEFAULTS["KvCacheConfig"] == CONTRACT["KvCacheConfig"]
    llmapi = surface.SYMBOLS["tensorrt_llm.llmapi"]
    assert list(llmapi["KvCacheConfig"]) == list(CONTRACT["KvCacheConfig"])
    assert list(llmapi["CudaGraphConfig"]) == CONTRACT["CudaGraphConfig"]
    assert set(MEMORY_TYPES) <= set(CONTRACT["ExecutorMemoryType"])


def test_the_double_has_all_of_it() -> None:
    assert surface.differences() == []


class KvCacheConfig:
    def __init__(self, enable_block_reuse: bool = False, free_gpu_memory_fraction: float = 0.9, dtype: str = "auto"):
        self.enable_block_reuse = enable_block_reuse


class TorchLlmArgs:
    model_fields = dict.fromkeys(surface.LLM_ARGS - {"model_kwargs"})


async def release(self: Any, kinds: Any) -> None: ...


MemoryType = StrEnum("MemoryType", [(name, name) for name in MEMORY_TYPES if name != "model_weights"])  # type: ignore[misc]

Change = Callable[[pytest.MonkeyPatch], None]


def replaced(path: str, value: Any) -> Change:
    return lambda patch: patch.setattr(path, value, raising=False)


def without(path: str) -> Change:
    return lambda patch: patch.delattr(path)


CHANGES: dict[str, tuple[Change, list[str]]] = {
    "module": (
        lambda patch: patch.setitem(sys.modules, "tensorrt_llm._torch.utils", None),
        ["no module tensorrt_llm._torch.utils: import of tensorrt_llm._torch.utils halted; None in sys.modules"],
    ),
    "symbol": (without("tensorrt_llm.llmapi.CudaGraphConfig"), ["tensorrt_llm.llmapi has no CudaGraphConfig"]),
    "method": (without("tensorrt_llm.AsyncLLM.pause_generation"), ["AsyncLLM has no method pause_generation"]),
    "keyword": (replaced("tensorrt_llm.AsyncLLM.release", release), ["AsyncLLM.release takes no 'tags'"]),
    "argument": (
        replaced("tensorrt_llm.llmapi.llm_args.TorchLlmArgs", TorchLlmArgs),
        ["AsyncLLM takes no argument 'model_kwargs'"],
    ),
    "field and default": (
        replaced("tensorrt_llm.llmapi.KvCacheConfig", KvCacheConfig),
        [
            "KvCacheConfig has no 'tokens_per_block'",
            "KvCacheConfig.enable_block_reuse is False by default, and was True",
        ],
    ),
    "member": (
        replaced("tensorrt_llm.llmapi.llm_args.ExecutorMemoryType", MemoryType),
        ["ExecutorMemoryType has no 'model_weights'"],
    ),
    "extension": (
        replaced("tensorrt_llm.llmapi.rlhf_utils.WorkerExtension", object),
        ["WorkerExtension has no method update_weights"],
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_differs_is_named(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    change, expected = CHANGES[case]
    change(monkeypatch)
    assert surface.differences() == expected


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_surface_decides_on_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert smoke.main(["--surface-only"]) == 0
    assert "0 differences" in capsys.readouterr().out
    monkeypatch.delattr("tensorrt_llm.AsyncLLM.resume")
    assert smoke.main(["--surface-only"]) == 1
    assert "differs: AsyncLLM has no method resume" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
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
