"""Options, versions, and the explanation of a failed start; nothing here starts SGLang."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rlplug_devkit.models import make_model_folder
from rlplug_engines.colocated import SHARED_NAMES, MemoryBefore
from rlplug_rollout_sglang import SGLangServerRollout, plugin
from rlplug_rollout_sglang import options as options_module
from rlplug_rollout_sglang.colocated import KV_MARGIN, SGLangRollout, check_cache
from rlplug_rollout_sglang.options import CONTEXT_MARGIN, SGLangOptions
from rlplug_rollout_sglang.versions import require_sglang

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import FP8Weights, Placement, PolicySpec, RolloutEngine
from rlplug.registry import Registry
from rlplug.types import GIB

SPEC = PolicySpec("folder", torch.bfloat16, eos_token_ids=(1, 7), pad_token_id=0, max_context=4096)
KNOWN = {
    "page_size",
    "schedule_policy",
    "cuda_graph_bs_decode",
    "cuda_graph_max_bs_decode",
    "disable_prefill_cuda_graph",
}
KNOWN |= {"model_path", "tp_size", "kv_cache_dtype"}
FORMERLY_KNOWN = {"page_size", "cuda_graph_bs", "cuda_graph_max_bs", "disable_piecewise_cuda_graph"}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "sglang_argument_names", lambda: KNOWN)


IN_FP8 = dataclasses.replace(SPEC, fp8=FP8Weights(("a.weight",), ("lm_head.weight",)))


def test_weights_in_fp8_are_a_part_of_the_models_configuration() -> None:
    overrides = json.loads(SGLangOptions().arguments(IN_FP8)["json_model_override_args"])
    assert overrides["quantization_config"]["modules_to_not_convert"] == ["lm_head"]
    assert "json_model_override_args" not in SGLangOptions().arguments(SPEC)


def test_nothing_else_says_what_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "sglang_argument_names", lambda: {"quantization"})
    with pytest.raises(ConfigError, match=r"server_args\.quantization and model.weight_sync both say what weights are"):
        SGLangOptions(server_args={"quantization": "fp8"}).arguments(IN_FP8)


# ---- options --------------------------------------------------------------------------------------------------------


def test_what_is_null_is_left_to_sglang() -> None:
    arguments = SGLangOptions().arguments(SPEC)
    left = {"max_total_tokens", "max_running_requests", "chunked_prefill_size", "attention_backend"}
    assert not {*left, "cuda_graph_bs_decode", "cuda_graph_max_bs_decode"} & {*arguments}
    assert arguments["model_path"] == "folder"
    assert arguments["dtype"] == "bfloat16"
    assert arguments["load_format"] == "dummy"
    assert arguments["skip_tokenizer_init"] is True
    assert arguments["sampling_backend"] == "rlplug"
    assert arguments["disable_prefill_cuda_graph"] is True


def test_options_become_arguments() -> None:
    chosen = SGLangOptions(
        mem_fraction_static=0.7,
        max_total_tokens=9000,
        max_running_requests=7,
        context_length=100,
        dtype="float16",
        kv_cache_dtype="fp8_e4m3",
        chunked_prefill_size=-1,
        attention_backend="triton",
        disable_radix_cache=True,
        cuda_graph_batch_sizes=[1, 8],
        cuda_graph_max_batch_size=8,
        cuda_graphs_for_prompts=True,
        tensor_parallel_size=2,
        seed=3,
    )
    expected = {
        "mem_fraction_static": 0.7,
        "max_total_tokens": 9000,
        "max_running_requests": 7,
        "context_length": 100 + CONTEXT_MARGIN,
        "dtype": "float16",
        "kv_cache_dtype": "fp8_e4m3",
        "chunked_prefill_size": -1,
        "attention_backend": "triton",
        "disable_radix_cache": True,
        "cuda_graph_bs_decode": [1, 8],
        "cuda_graph_max_bs_decode": 8,
        "disable_prefill_cuda_graph": False,
        "tp_size": 2,
        "random_seed": 3,
    }
    assert expected.items() <= chosen.arguments(SPEC).items()


def test_shared_names_are_the_engines_own_as_the_page_says() -> None:
    """It catches a shared name without an effect, and a row of the page that names another option."""
    values = {
        "gpu_memory_utilization": 0.7,
        "max_model_len": 100,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 512,
    }
    assert {*SHARED_NAMES.values()} == values.keys()
    page = (Path(__file__).parents[3] / "docs" / "rollout-engines.md").read_text()
    own = {shared: getattr(SGLangOptions, attribute) for attribute, shared in SHARED_NAMES.items()}
    for shared, name in own.items():
        assert re.search(rf"^\| `{shared}`[^|]* \| `{name}`", page, re.M), shared
    alike = SGLangOptions(**{own[shared]: value for shared, value in values.items()})  # type: ignore[arg-type]
    assert SGLangOptions(**values).arguments(SPEC) == alike.arguments(SPEC)  # type: ignore[arg-type]


def test_former_names_are_used_where_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "sglang_argument_names", lambda: FORMERLY_KNOWN)
    arguments = SGLangOptions(cuda_graph_batch_sizes=[4], cuda_graph_max_batch_size=4).arguments(SPEC)
    assert arguments["cuda_graph_bs"] == [4]
    assert arguments["cuda_graph_max_bs"] == 4
    assert arguments["disable_piecewise_cuda_graph"] is True
    assert not {"cuda_graph_bs_decode", "cuda_graph_max_bs_decode", "disable_prefill_cuda_graph"} & {*arguments}


def test_without_cuda_graphs_there_are_none_for_prompts_either() -> None:
    arguments = SGLangOptions(disable_cuda_graph=True, cuda_graphs_for_prompts=True).arguments(SPEC)
    assert arguments["disable_cuda_graph"] is True
    assert arguments["disable_prefill_cuda_graph"] is True


def test_context_has_a_margin() -> None:
    assert SGLangOptions(context_length=9999).arguments(SPEC)["context_length"] == 4096 + CONTEXT_MARGIN


def test_other_arguments_pass_through() -> None:
    assert SGLangOptions(server_args={"page_size": 32}).arguments(SPEC)["page_size"] == 32


@pytest.mark.parametrize(
    ("server_args", "message"),
    [
        ({"page_sice": 32}, r"server_args\.page_sice is no argument of the installed SGLang\. Did you mean"),
        ({"tp_size": 2}, r"set rollout\.tensor_parallel_size instead"),
        ({"cuda_graph_max_bs": 2}, r"set rollout\.cuda_graph_max_batch_size instead"),
        ({"model_path": "x"}, r"server_args\.model_path cannot be set: model\.policy\.path names it"),
        ({"sampling_backend": "pytorch"}, r"cannot be set: the plugin brings one that draws by seed"),
    ],
)
def test_arguments_that_cannot_be_passed(server_args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SGLangOptions(server_args=server_args).arguments(SPEC)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mem_fraction_static": 1},
        *({name: 0} for name in SGLangOptions.positive),
        {"chunked_prefill_size": 0},
        {"chunked_prefill_size": -2},
        {"cuda_graph_batch_sizes": []},
    ],
)
def test_values_that_cannot_be(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"rollout\.{name} is"):
        SGLangOptions(**wrong)


# ---- what an engine can do, and where -------------------------------------------------------------------------------


def test_capabilities_are_those_of_the_options() -> None:
    assert SGLangRollout().capabilities.streaming
    assert SGLangRollout().capabilities.multi_turn
    assert not SGLangRollout(tensor_parallel_size=2).capabilities.streaming
    assert not SGLangRollout(disable_radix_cache=True).capabilities.multi_turn
    assert SGLangRollout.capabilities.streaming


def test_a_cpu_is_refused() -> None:
    message = "SGLangRollout, which needs a GPU, and the trainer runs on cpu: use HFRollout"
    with pytest.raises(ConfigError, match=message):
        SGLangRollout().start(SPEC, Placement(torch.device("cpu"), 0, 1))


def test_plugin_registers_its_engines() -> None:
    registry = Registry()
    plugin.rlplug_register_rollouts(registry)
    assert {"SGLangRollout", "SGLangServerRollout"} == set(registry.names("rollouts"))


def test_close_before_start_is_nothing() -> None:
    engine = SGLangRollout()
    engine.close()
    assert engine._process is None


# ---- versions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "is_known"), [("0.5.12", False), ("0.5.13", True), ("0.5.23", True), ("0.5.24", False)]
)
def test_versions_that_are_known(monkeypatch: pytest.MonkeyPatch, version: str, is_known: bool) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    if is_known:
        assert str(require_sglang()) == version
    else:
        with pytest.raises(ConfigError, match=rf"SGLang {version} is installed.*rlplug-rollout-sglang knows"):
            require_sglang()


def test_missing_sglang_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match=r"pip install 'rlplug-rollout-sglang\[cuda\]'"):
        require_sglang()


# ---- a failed start -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "share", "weights", "words"),
    [
        (40, 0.6, 39, "Free memory with model.memory.offload"),
        (139, 0.1, 16, "Raise rollout.mem_fraction_static, or share the model"),
        (139, 0.9, 16, "lower rollout.mem_fraction_static, which leaves more for passes"),
    ],
)
def test_failed_start_says_what_to_set(free: int, share: float, weights: int, words: str) -> None:
    memory = MemoryBefore(total=140 * GIB, free=free * GIB, trainer=int(0.5 * GIB))
    engine = SGLangRollout(mem_fraction_static=share)
    assert words in engine.memory_advice(memory, weights * GIB, longest=4096).remedy


def test_cache_that_would_cut_completions_short_is_refused() -> None:
    check_cache(1000 + KV_MARGIN, longest=1000)
    with pytest.raises(RunError, match=r"1,255 tokens, and one sequence may need 1,256: raise rollout\.mem_fraction"):
        check_cache(1000 + KV_MARGIN - 1, longest=1000)


def test_weights_in_fp8_are_refused_where_scales_would_go_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(ConfigError, match="changes the form of scales at its start and not after a sync"):
        SGLangRollout().start(IN_FP8, Placement(torch.device("cuda", 0), 0, 1))


@pytest.mark.parametrize("engine", [SGLangRollout(), SGLangServerRollout(gpus=[1])], ids=lambda e: type(e).__name__)
def test_models_whose_scales_sglang_drops_are_refused_in_fp8(engine: RolloutEngine, tmp_path: Path) -> None:
    make_model_folder("llama", tmp_path)
    policy = dataclasses.replace(IN_FP8, path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"Rollout cannot take LlamaForCausalLM in FP8: .* drops the scales"):
        engine.check(policy)
    engine.check(dataclasses.replace(policy, fp8=None))
