"""What ``SGLangServerRollout`` does as a client, with a double of SGLang's server in a process of its own."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import ForkedProcess
from rlplug_devkit.models import make_model_folder
from rlplug_engines.servers.addresses import free_ports
from rlplug_engines.servers.backend import BackendContext
from rlplug_engines.servers.processes import ServerSlot
from rlplug_rollout_sglang.options import SGLangOptions
from rlplug_rollout_sglang.server import SGLangBackend, SGLangServerRollout
from transformers import AutoModelForCausalLM

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import EngineFault, Placement, PolicySpec
from rlplug.interfaces.weight_sync import Bucket, TensorInfo
from rlplug.types import Request, SamplingParams

pytestmark = pytest.mark.kit

PLACEMENT = Placement(torch.device("cpu"), rank=0, world_size=1)
DOUBLE = Path(__file__).with_name("server_double.py")
KEY = "RLPLUG_TEST_KEY"
TOKENS = 40

Started = Callable[..., SGLangServerRollout]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> PolicySpec:
    folder = tmp_path_factory.mktemp("model") / "llama"
    make_model_folder("llama", folder)
    return PolicySpec(str(folder), torch.float32, eos_token_ids=(), pad_token_id=0, max_context=2048)


@pytest.fixture(scope="module")
def bucket(spec: PolicySpec) -> Bucket:
    model: Any = AutoModelForCausalLM.from_pretrained(spec.path, dtype=torch.float32)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


@pytest.fixture
def doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Starts doubles with some settings; returns their URLs."""
    processes: list[ForkedProcess] = []
    monkeypatch.setenv(KEY, "their key")

    def start(count: int = 1, **settings: Any) -> list[str]:
        file = tmp_path / "settings.json"
        file.write_text(json.dumps({"key": "their key"} | settings))
        ports = free_ports(count)
        processes.extend(ForkedProcess([sys.executable, DOUBLE, str(port), str(file)]) for port in ports)
        return [f"http://127.0.0.1:{port}" for port in ports]

    yield start
    for process in processes:
        process.kill()


@pytest.fixture
def started(doubles: Callable[..., list[str]], spec: PolicySpec) -> Iterator[Started]:
    """Starts an engine for doubles with some settings."""
    engines: list[SGLangServerRollout] = []

    def start(count: int = 1, **settings: Any) -> SGLangServerRollout:
        engine = SGLangServerRollout(urls=doubles(count, **settings), api_key_env=KEY, sync_deadline_s=20.0)
        engines.append(engine)
        engine.start(spec, PLACEMENT)
        return engine

    yield start
    for engine in engines:
        engine.close()


def state(engine: SGLangServerRollout, index: int = 0) -> dict[str, Any]:
    """Return what a double says of itself."""
    assert engine.urls is not None
    with urllib.request.urlopen(f"{engine.urls[index]}/state") as answer:
        result: dict[str, Any] = json.load(answer)
    return result


def requests(count: int, name: str = "r") -> list[Request]:
    return [Request(f"{name}/{index}", (3, 4 + index), seed=index) for index in range(count)]


def expected(request: Request, count: int) -> list[int]:
    """The double's rule."""
    first = sum(request.prompt_ids) + request.seed
    return [(first + index) % TOKENS for index in range(count)]


def collect_all(engine: SGLangServerRollout, count: int) -> list[Any]:
    completions: list[Any] = []
    deadline = time.monotonic() + 30
    while len(completions) < count and time.monotonic() < deadline:
        completions += engine.collect(1.0)
    return completions


# ---- generation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_completions_come_back_in_order_with_their_logprobs(started: Started, bucket: Bucket, count: int) -> None:
    engine = started(count)
    engine.update_weights(iter([bucket]), 7)
    asked = requests(5)
    completions = engine.generate(asked, SamplingParams(12))
    assert [c.token_ids.tolist() for c in completions] == [expected(request, 12) for request in asked]
    assert completions[0].logprobs == pytest.approx([-token / 10 - 1 for token in completions[0].token_ids])
    assert {(c.finish_reason, c.policy_version) for c in completions} == {("length", 7)}
    assert all("/generate" in state(engine, index)["calls"] for index in range(count)), "in turn to all servers"


def test_streamed_completions_are_the_same(started: Started, bucket: Bucket) -> None:
    engine = started()
    engine.update_weights(iter([bucket]), 1)
    asked = requests(4)
    engine.submit(asked, SamplingParams(21))
    completions = {c.request_id: c for c in collect_all(engine, 4)}
    assert [completions[r.request_id].token_ids.tolist() for r in asked] == [expected(r, 21) for r in asked]


def test_a_completion_is_cut_at_the_context(started: Started, bucket: Bucket) -> None:
    engine = started(info={"max_req_input_len": 12})  # a context of 18, 8 of which SGLang keeps free
    engine.update_weights(iter([bucket]), 1)
    (completion,) = engine.generate(requests(1), SamplingParams(100))
    assert len(completion.token_ids) == 10 - 2
    with pytest.raises(RunError, match=r"10 tokens.*ends at 10: raise rollout\.context_length"):
        engine.generate([Request("long", tuple(range(10)), seed=0)], SamplingParams(1))


def test_abort_returns_what_came_and_tells_the_server(started: Started, bucket: Bucket) -> None:
    """Requests of one id may follow each other at once: the server knows each by a name of its own."""
    engine = started(seconds_per_event=0.2, slow_abort=True)
    engine.update_weights(iter([bucket]), 1)
    (request,) = requests(1)
    for _ in range(2):
        engine.submit([request], SamplingParams(1000))
        time.sleep(0.7)
        engine.abort([request.request_id])
        (partial,) = collect_all(engine, 1)
        assert partial.finish_reason == "abort"
        assert 0 < len(partial.token_ids) < 100
        assert partial.token_ids.tolist() == expected(request, len(partial.token_ids))
        assert len(partial.logprobs) == len(partial.token_ids)
    engine.update_weights(iter([bucket]), 2)  # waits until they are gone
    told = state(engine)
    assert len(set(told["aborted"])) == 2
    assert told["running"] == []


def test_tokens_of_other_weights_are_refused(started: Started, bucket: Bucket) -> None:
    engine = started(said_version="1")
    engine.update_weights(iter([bucket]), 1)
    engine.generate(requests(1), SamplingParams(2))
    engine.update_weights(iter([bucket]), 2)
    with pytest.raises(RunError, match="with weights of version 1, and the policy has version 2") as error:
        engine.generate(requests(1), SamplingParams(2))
    assert not isinstance(error.value, EngineFault), "a new start would not help"


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"has_sessions": True}, {"has_sessions": True, "left_open": True}])
def test_weights_reach_all_servers(started: Started, bucket: Bucket, settings: dict[str, Any]) -> None:
    """Newer servers take them between two calls, also where a trainer that is gone left the second one out."""
    engine = started(2, **settings)
    report = engine.update_weights(iter([bucket[:3], bucket[3:]]), 1)
    assert (report.num_tensors, report.num_buckets, report.policy_version) == (len(bucket), 2, 1)
    for index in range(2):
        told = state(engine, index)
        assert told["sums"] == pytest.approx({name: float(tensor.double().sum()) for name, tensor in bucket})
        assert told["calls"][-1] == "/flush_cache"
        assert not told["in_session"]
    engine.close()
    assert state(engine)["groups"] == 0, "a server that stays has left the trainer's group"


def test_weights_of_many_dtypes_keep_their_bits(started: Started, spec: PolicySpec) -> None:
    engine = started()
    tensors = [torch.arange(6.0).view(2, 3).bfloat16(), torch.tensor(1.5), torch.full((4,), 2.0).half()]
    bucket = list(zip("abc", tensors, strict=True))
    engine._weights = {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in bucket}
    engine.update_weights(iter([bucket]), 1)
    assert state(engine)["sums"] == {"a": 15.0, "b": 1.5, "c": 8.0}


def test_refused_bucket_leaves_the_servers_ready_for_another_sync(started: Started, bucket: Bucket) -> None:
    engine = started(has_sessions=True)
    with pytest.raises(RunError, match="no weight 'wrong'"):
        engine.update_weights(iter([bucket[:2], [("wrong", bucket[0][1])]]), 1)
    engine.update_weights(iter([bucket]), 2)
    assert {c.policy_version for c in engine.generate(requests(2), SamplingParams(2))} == {2}


def test_server_that_dies_in_a_sync_is_a_fault(started: Started, bucket: Bucket) -> None:
    engine = started(dies_in_sync=True)
    with pytest.raises(EngineFault, match=r"cannot be reached|transfer of weights"):
        engine.update_weights(iter([bucket]), 1)


# ---- start ----------------------------------------------------------------------------------------------------------


def test_wrong_key_is_refused(doubles: Callable[..., list[str]], spec: PolicySpec, monkeypatch: Any) -> None:
    urls = doubles()
    monkeypatch.setenv(KEY, "wrong")
    engine = SGLangServerRollout(urls=urls, api_key_env=KEY)
    with pytest.raises(RunError, match=rf"refuses the key of {KEY} .*: set it to the server's --api-key"):
        engine.start(spec, PLACEMENT)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"version": "0.5.12"}, r"SGLang 0\.5\.12 runs at .* knows 0\.5\.13"),
        ({"skip_tokenizer_init": False}, "skip_tokenizer_init=False: start it with --skip-tokenizer-init"),
        ({"incremental_streaming_output": False}, "start it with --incremental-streaming-output"),
        ({"sampling_backend": "flashinfer"}, "sampling_backend='flashinfer': start it with --sampling-backend rlplug"),
        ({"dp_size": 2}, "dp_size=2: start it without --dp-size"),
        (
            {"json_model_override_args": '{"quantization_config": {"quant_method": "fp8"}}'},
            "other layers in FP8 than model.weight_sync sends: start it without a quantization_config",
        ),
    ],
)
def test_server_that_training_cannot_use_is_refused(started: Started, info: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        started(info=info)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"urls": []}, "rollout.urls is empty"),
        ({"urls": ["127.0.0.1:30000"]}, "http://HOST:PORT"),
        ({"urls": ["http://127.0.0.1:30000"], "gpus": [1]}, "rollout.gpus is set"),
        ({"urls": ["http://127.0.0.1:30000"], "max_running_requests": 8}, "rollout.max_running_requests is set"),
        ({"urls": ["http://10.0.0.7:30000"]}, r"SGLANG_API_KEY \(rollout.api_key_env\) is not set.*--api-key"),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, Any], message: str, monkeypatch: Any) -> None:
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=message):
        SGLangServerRollout(**arguments)


def test_the_key_is_in_no_command_line(tmp_path: Path, spec: PolicySpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplug_rollout_sglang.server.require_sglang", lambda: None)
    monkeypatch.setattr(SGLangOptions, "arguments", lambda *_: {"model_path": "m", "stream_interval": 3})
    backend = SGLangBackend(SGLangOptions(), BackendContext(spec, torch.device("cuda", 0), is_launched=True))
    how = backend.launch(ServerSlot(port=1234, key="very secret", folder=tmp_path))
    assert "very secret" not in " ".join(how.command)
    arguments = json.loads(Path(how.command[-1]).read_text())
    assert arguments == {
        "model_path": "m",
        "stream_interval": 3,
        "host": "127.0.0.1",
        "port": 1234,
        "api_key": "very secret",
        "incremental_streaming_output": True,
    }


# ---- stats ----------------------------------------------------------------------------------------------------------


def test_stats_are_of_servers_and_completions(started: Started, bucket: Bucket) -> None:
    engine = started(seconds=1.5)
    engine.update_weights(iter([bucket]), 1)
    engine.stats()
    engine.generate(requests(4), SamplingParams(10))
    stats = engine.stats()
    assert stats["num_tokens"] == 40
    assert stats["prefix_cache_hits"] == 0.5
    assert stats["preemptions"] == 4
    assert (stats["running"], stats["waiting"], stats["kv_cache_use"]) == (4, 2, 0.25)
    assert engine.stats()["num_tokens"] == 0
