"""Options, versions and the explanation of a failed start; nothing here starts vLLM."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch
from packaging.version import Version
from rlplug_engines.colocated import EngineStats, MemoryBefore, RunningRequest
from rlplug_engines.servers import BackendContext, ServerSlot
from rlplug_rollout_vllm import options as options_module
from rlplug_rollout_vllm import server as server_module
from rlplug_rollout_vllm.colocated import VLLMRollout
from rlplug_rollout_vllm.engine_requests import SAMPLING_EXTRA, VLLMRequests, sampling_arguments
from rlplug_rollout_vllm.options import VERSIONS, VLLMOptions, VLLMServerOptions
from rlplug_rollout_vllm.server import VLLMBackend

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import AdapterWeights, EngineFault, FP8Weights, PolicySpec, RouterShape
from rlplug.types import GIB, Request, SamplingParams

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SPEC = PolicySpec("folder", torch.bfloat16, eos_token_ids=(1, 7), pad_token_id=0, max_context=4096)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    names = {"model", "seed", "block_size", "swap_space", "max_num_seqs", "async_scheduling"}
    monkeypatch.setattr(options_module, "vllm_argument_names", lambda: names)
    monkeypatch.setattr(options_module, "vllm_version", lambda: Version("0.32.0"))


IN_FP8 = dataclasses.replace(SPEC, fp8=FP8Weights(("a.weight",), ("lm_head.weight",)))


def test_weights_in_fp8_are_a_part_of_the_models_configuration():
    arguments = VLLMOptions().arguments(IN_FP8, GPU)
    assert arguments["hf_overrides"]["quantization_config"]["modules_to_not_convert"] == ["lm_head"]
    assert "hf_overrides" not in VLLMOptions().arguments(SPEC, GPU)


def test_scales_stay_as_they_were_sent(tmp_path, monkeypatch):
    """DeepGEMM would round them, and weights anew, and nothing would say so; Blackwell's kernels read no others."""
    monkeypatch.setattr(type(VERSIONS), "require_distribution", lambda *_: None)
    monkeypatch.setattr(server_module, "frontend_flags", list)
    monkeypatch.delenv("VLLM_USE_DEEP_GEMM_E8M0", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def environment(spec: PolicySpec, device: torch.device = GPU) -> dict[str, str | None]:
        backend = VLLMBackend(VLLMServerOptions(), BackendContext(spec, device, True))
        return {**backend.launch(ServerSlot(8000, "key", tmp_path)).environment}

    assert environment(IN_FP8)["VLLM_USE_DEEP_GEMM_E8M0"] == "0"
    powers = FP8Weights(("a.weight",), (), power_of_two_scales=True)
    for spec, device in ((SPEC, GPU), (dataclasses.replace(SPEC, fp8=powers), GPU), (IN_FP8, CPU)):
        assert "VLLM_USE_DEEP_GEMM_E8M0" not in environment(spec, device)
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "1")
    assert environment(IN_FP8)["VLLM_USE_DEEP_GEMM_E8M0"] == "1"
    monkeypatch.delenv("VLLM_USE_DEEP_GEMM_E8M0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert "VLLM_USE_DEEP_GEMM_E8M0" not in environment(IN_FP8)


def test_experts_are_asked_for_where_a_run_replays_them():
    replaying = dataclasses.replace(SPEC, routers=RouterShape((0, 1), num_experts=8, top_k=2))
    arguments = VLLMOptions().arguments(replaying, GPU)
    assert arguments["enable_return_routed_experts"]
    assert arguments["enable_prefix_caching"]
    assert "enable_return_routed_experts" not in VLLMOptions().arguments(SPEC, GPU)
    with pytest.raises(ConfigError, match=r"model.router_replay is true, and rollout.enable_prefix_caching false"):
        VLLMOptions(enable_prefix_caching=False).arguments(replaying, GPU)


def test_adapters_are_served_one_version_at_a_time_at_the_next_rank_that_vllm_has(monkeypatch):
    ranks = SimpleNamespace(MaxLoRARanks=Literal[1, 8, 16, 512])
    for module in ("vllm", "vllm.config"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.config.lora", ranks)
    modules = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj")
    serving = dataclasses.replace(SPEC, adapters=AdapterWeights(9, 18.0, modules))
    expected = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16, "lora_target_modules": ["q_proj", "up_proj"]}
    assert expected.items() <= VLLMOptions().arguments(serving, GPU).items()
    assert not expected.keys() & VLLMOptions().arguments(SPEC, GPU).keys()
    too_high = dataclasses.replace(SPEC, adapters=AdapterWeights(513, 18.0, modules))
    with pytest.raises(ConfigError, match=r"model\.lora\.rank is 513.* up to 512: lower it, or set model\.lora\.sync"):
        VLLMOptions().arguments(too_high, GPU)


def test_nothing_else_says_what_weights_are(monkeypatch):
    monkeypatch.setattr(options_module, "vllm_argument_names", lambda: {"hf_overrides"})
    with pytest.raises(ConfigError, match=r"engine_args\.hf_overrides and model.weight_sync both say what weights are"):
        VLLMOptions(engine_args={"hf_overrides": {}}).arguments(IN_FP8, GPU)


# ---- options --------------------------------------------------------------------------------------------------------


def test_what_is_null_is_left_to_vllm():
    arguments = VLLMOptions().arguments(SPEC, GPU)
    assert not {"max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "kv_cache_memory_bytes"} & {
        *arguments
    }
    assert arguments["max_model_len"] == 4096
    assert arguments["dtype"] == "bfloat16"
    assert arguments["enforce_eager"] is False


def test_a_server_gets_its_api_processes(tmp_path, monkeypatch):
    """It would serve with one alone, and nothing would say so."""
    monkeypatch.setattr(type(VERSIONS), "require_distribution", lambda *_: None)  # this runs where vLLM is absent too
    monkeypatch.setattr(server_module, "frontend_flags", list)
    backend = VLLMBackend(VLLMServerOptions(api_server_count=3), BackendContext(SPEC, CPU, True))
    assert "--api-server-count=3" in backend.launch(ServerSlot(8000, "key", tmp_path)).command
    backend = VLLMBackend(VLLMServerOptions(), BackendContext(SPEC, GPU, True))
    assert "--api-server-count=2" in backend.launch(ServerSlot(8000, "key", tmp_path)).command
    with pytest.raises(ConfigError, match=r"rollout\.api_server_count is 0"):
        VLLMServerOptions(api_server_count=0)


def test_options_become_arguments():
    chosen = VLLMOptions(
        max_num_seqs=7, max_model_len=100, enable_prefix_caching=False, kv_cache_gib=2, dtype="float16", seed=3
    )
    arguments = chosen.arguments(SPEC, GPU)
    expected = {
        "max_num_seqs": 7,
        "max_model_len": 100,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 2 * GIB,
        "dtype": "float16",
        "seed": 3,
    }
    assert expected.items() <= arguments.items()


def test_cpu_starts_eager_with_whole_prompts():
    arguments = VLLMOptions().arguments(SPEC, CPU)
    assert arguments["enforce_eager"] is True
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] >= 4096
    assert arguments["kv_cache_memory_bytes"] == GIB
    with pytest.raises(ConfigError, match="enable_chunked_prefill is true"):
        VLLMOptions(enable_chunked_prefill=True).arguments(SPEC, CPU)


@pytest.mark.parametrize("longest", [20, 512, 4096])
@pytest.mark.parametrize("num_seqs", [1, 7, 256, 300, 1000, 1280, 5000, 9000])
def test_the_warm_up_of_an_older_vllm_reads_no_further_than_its_block_table(monkeypatch, num_seqs, longest):
    """Its last request takes the tokens that are left over: 1,280 sequences of 512 tokens stopped at their start."""
    options = VLLMOptions(max_num_seqs=num_seqs, max_model_len=longest)
    assert "max_num_batched_tokens" not in options.arguments(SPEC, GPU)
    monkeypatch.setattr(options_module, "vllm_version", lambda: Version("0.26.0"))
    for default in (16384, 8192, 2048):
        own = min(default, num_seqs * longest)  # as vLLM limits it
        num_tokens = options.arguments(SPEC, GPU).get("max_num_batched_tokens", own)
        num_requests = min(num_tokens, num_seqs)
        assert num_tokens // num_requests + num_tokens % num_requests <= longest


def test_tokens_that_break_the_warm_up_of_an_older_vllm_are_refused(monkeypatch):
    options = VLLMOptions(max_num_seqs=1280, max_model_len=512, max_num_batched_tokens=16384)
    assert options.arguments(SPEC, GPU)["max_num_batched_tokens"] == 16384
    monkeypatch.setattr(options_module, "vllm_version", lambda: Version("0.26.0"))
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 16384, .* to 15360, or install vLLM 0\.27"):
        options.arguments(SPEC, GPU)
    fitting = dataclasses.replace(options, max_num_batched_tokens=15360)
    assert fitting.arguments(SPEC, GPU)["max_num_batched_tokens"] == 15360


def test_other_arguments_pass_through():
    assert VLLMOptions(engine_args={"block_size": 32}).arguments(SPEC, GPU)["block_size"] == 32


@pytest.mark.parametrize(
    ("engine_args", "message"),
    [
        ({"blok_size": 32}, r"engine_args\.blok_size is no argument of the installed vLLM\. Did you mean 'block_size'"),
        ({"model": "x"}, r"engine_args\.model cannot be set: model\.policy\.path names it"),
    ],
)
def test_arguments_that_cannot_be_passed(engine_args, message):
    with pytest.raises(ConfigError, match=message):
        VLLMOptions(engine_args=engine_args).arguments(SPEC, GPU)


@pytest.mark.parametrize("wrong", [{"gpu_memory_utilization": 1.1}, *({name: 0} for name in VLLMOptions.positive)])
def test_values_that_cannot_be(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"rollout\.{name} is"):
        VLLMOptions(**wrong)


# ---- versions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "is_known"), [("0.25.3", False), ("0.26.0", True), ("0.33.0+cpu", True), ("0.34", False)]
)
def test_versions_that_are_known(monkeypatch, version, is_known):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    if is_known:
        assert str(VERSIONS.require_module("vllm")) == version
    else:
        with pytest.raises(ConfigError, match=rf"vLLM {version} is installed.*rlplug-rollout-vllm knows"):
            VERSIONS.require_module("vllm")


@pytest.mark.parametrize("place", ["common", "launchers", "openai"])
def test_the_api_servers_arguments_are_found_in_each_known_version(tmp_path, monkeypatch, place):
    """Would miss vLLM's next move of their file; without the middleware, routes for weights ask for no key."""
    file = tmp_path / "entrypoints" / place / "cli_args.py"
    file.parent.mkdir(parents=True)
    file.write_text("class BaseFrontendArgs:\n    middleware: list[str] = []\n    enable_scale_out: bool = False\n")
    monkeypatch.setattr(server_module, "package_folder", lambda name: tmp_path)
    assert server_module.frontend_flags() == [
        "--middleware=rlplug_rollout_vllm.server_key.RequireKey",
        "--enable-scale-out",
    ]


def test_missing_vllm_is_said_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"pip install 'rlplug-rollout-vllm\[cuda\]'"):
        VERSIONS.require_module("vllm")


# ---- a failed start -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "share", "weights", "words"),
    [
        (40, 0.6, 16, "Set rollout.gpu_memory_utilization to 0.28 or less, or free memory with model.memory.offload"),
        (139, 0.1, 16, "Raise rollout.gpu_memory_utilization, or share the model"),
        (139, 0.5, 16, "one sequence of rollout.max_model_len 131072"),
    ],
)
def test_failed_start_says_what_to_set(free, share, weights, words):
    memory = MemoryBefore(total=140 * GIB, free=free * GIB, trainer=90 * GIB)
    engine = VLLMRollout(gpu_memory_utilization=share)
    assert words in engine.memory_advice(memory, weights * GIB, longest=131072).remedy


# ---- requests -------------------------------------------------------------------------------------------------------


def test_sampling_arguments_name_every_end_token():
    arguments = sampling_arguments(Request("a", (1,), seed=5), SamplingParams(10, temperature=0.7), SPEC, room=6)
    assert arguments["max_tokens"] == 6
    assert arguments["stop_token_ids"] == [1, 7]
    assert arguments["ignore_eos"] is True
    assert arguments["seed"] == 5


def test_extra_options_reach_vllm_and_no_others_are_taken():
    """Alone catches an option that is dropped on its way, or one by which a user would override rlplug's own."""
    extra = {"min_p": 0.1, "repetition_penalty": 1.1}
    sampling = SamplingParams(10, extra=extra)
    arguments = sampling_arguments(Request("a", (1,), seed=5), sampling, SPEC, room=6)
    assert arguments == sampling_arguments(Request("a", (1,), seed=5), SamplingParams(10), SPEC, room=6) | extra
    assert not arguments.keys() - extra.keys() & SAMPLING_EXTRA
    VLLMRollout().check_sampling(sampling, "model.sampling")
    with pytest.raises(ConfigError, match=r"sampling\.extra\.minp: VLLMRollout knows no .* Did you mean 'min_p'\?"):
        VLLMRollout().check_sampling(SamplingParams(extra={"minp": 0.1}), "model.sampling")


def test_unknown_finish_reason_is_no_completion():
    logprobs = SimpleNamespace(token_ids=[1], logprobs=[0.0])
    generated = SimpleNamespace(token_ids=[1], logprobs=logprobs, finish_reason="error")
    answer = SimpleNamespace(outputs=[generated], prompt_token_ids=[1], num_cached_tokens=0)
    requests = VLLMRequests(None, SPEC, 4096, EngineStats(1, 1), deadline_s=1.0)
    running = RunningRequest(0, Request("a", (1,), seed=5), SamplingParams(10), 10, is_submitted=False, since=0.0)
    with pytest.raises(RunError, match="request a: vLLM ended it with finish reason 'error'"):
        requests.read(running, answer)
    generated.finish_reason = "stop"
    assert requests.read(running, answer).finish_reason == "stop"
    assert requests.read(running, answer).routed_experts is None


def test_routed_experts_are_those_of_layers_with_a_router():
    """vLLM returns a row for each token that it has read, in all decoder layers, in unsigned integers."""
    spec = dataclasses.replace(SPEC, routers=RouterShape((1, 2), num_experts=256, top_k=2))
    generated = SimpleNamespace(
        token_ids=[5, 1],
        logprobs=SimpleNamespace(token_ids=[5, 1], logprobs=[0.0, 0.0]),
        finish_reason="stop",
        routed_experts=np.arange(240, 252, dtype=np.uint8).reshape(2, 3, 2),
    )
    answer = SimpleNamespace(outputs=[generated], prompt_token_ids=[3], num_cached_tokens=0)
    requests = VLLMRequests(None, spec, 4096, EngineStats(1, 1), deadline_s=1.0)
    running = RunningRequest(0, Request("a", (3,), seed=5), SamplingParams(10), 10, is_submitted=False, since=0.0)
    experts = requests.read(running, answer).routed_experts
    assert experts.tolist() == [[[242, 243], [244, 245]], [[248, 249], [250, 251]], [[-1, -1], [-1, -1]]]
    generated.routed_experts = generated.routed_experts[:1]
    with pytest.raises(EngineFault, match=r"vLLM, at request a, returned routed experts of shape \[1, 3, 2\]"):
        requests.read(running, answer)
