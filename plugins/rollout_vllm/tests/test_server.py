"""Servers that die, hang, refuse or belong to somebody else, and a trainer that dies: on the CPU, with real ones."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import runs

pytest.importorskip("vllm", reason="`make test-vllm` installs vLLM")

from rlplug_devkit.models import make_model_folder
from rlplug_engines.servers import supervisor, to_flags
from rlplug_engines.servers.addresses import free_ports
from rlplug_rollout_vllm import VLLMServerRollout
from rlplug_rollout_vllm import server as server_module
from rlplug_rollout_vllm.options import VLLMOptions, VLLMServerOptions, vllm_argument_names
from rlplug_rollout_vllm.server import frontend_flags
from rlplug_rollout_vllm.weight_transfer import OVER_GLOO, OVER_NCCL
from transformers import AutoModelForCausalLM

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import EngineFault, Placement, PolicySpec
from rlplug.interfaces.weight_sync import Bucket
from rlplug.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.kit

PLACEMENT = Placement(torch.device("cpu"), rank=0, world_size=1)
GREEDY = SamplingParams(6, temperature=0.0)
KEY = "RLPLUG_TEST_KEY"
SMALL: dict[str, Any] = {"max_model_len": 2048, "kv_cache_gib": 0.25}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama"
    make_model_folder("llama", folder)
    return folder


@pytest.fixture(scope="module")
def spec(folder: Path) -> PolicySpec:
    return PolicySpec(str(folder), torch.float32, eos_token_ids=(), pad_token_id=0, max_context=2048)


@pytest.fixture(scope="module")
def bucket(folder: Path) -> Bucket:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


@dataclass(frozen=True)
class OtherServer:
    """A server that somebody else runs."""

    url: str
    key: str
    process: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherServer]:
    """Started with the documented command, but for what a CPU needs; it starts while the first tests run."""
    (port,) = free_ports(1)
    options = ["--enforce-eager", "--kv-cache-memory-bytes", str(1 << 28)]
    options += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"]
    changes = {"10.0.0.7": "127.0.0.1", "8000": str(port), "bfloat16": "float32", "4096": "2048"}
    changes['{"backend": "rlplug_nccl"}'] = json.dumps({"backend": OVER_GLOO})
    with (tmp_path_factory.mktemp("log") / "other.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, supervisor.__file__, str(os.getpid()), str(tmp_path_factory.mktemp("end")), sys.executable]
            + ["-m", "rlplug_rollout_vllm.serve", str(folder)]
            + [changes.get(word, word) for word in documented_flags()]
            + options,
            env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": "their key"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    # On a core that it shares with vLLM's engine process, which polls with sched_yield, a thread that slept was seen to
    # wait for 2 s until it ran again, as /proc/thread-self/schedstat says.
    psutil.Process(process.pid).cpu_affinity(sorted(os.sched_getaffinity(0))[:1])
    yield OtherServer(f"http://127.0.0.1:{port}", "their key", process)
    process.terminate()
    process.wait()


def documented_flags() -> list[str]:
    """Return those of ``vllm serve`` in the documentation."""
    text = (Path(__file__).parents[3] / "docs/rollout-engines.md").read_text()
    words = shlex.split(text[text.index("VLLM_SERVER_DEV_MODE=1") :].partition("\n```")[0].replace("\\\n", ""))
    assert words[2:5] == ["vllm", "serve", "MODEL"]
    return words[5:]


@pytest.fixture
def theirs(other: OtherServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[VLLMServerRollout]:
    """An engine for that server, not started."""
    monkeypatch.setenv(KEY, other.key)
    engine = VLLMServerRollout(urls=[other.url], api_key_env=KEY, start_deadline_s=180.0)
    yield engine
    engine.close()


def requests(name: str, count: int = 2) -> list[Request]:
    return [Request(f"{name}/{index}", (5, 9, 6 + index), seed=index) for index in range(count)]


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids.tolist() for completion in completions]


def running(pids: list[int]) -> list[int]:
    return [pid for pid in pids if runs(pid)]


# ---- what is refused before anything starts ---------------------------------------------------------------------


def test_url_of_another_host_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"http://10\.0\.0\.7:8000.*VLLM_API_KEY"):
        VLLMServerRollout(urls=["http://10.0.0.7:8000"])
    monkeypatch.setenv("VLLM_API_KEY", "a key")
    VLLMServerRollout(urls=["http://10.0.0.7:8000"])
    VLLMServerRollout(urls=["http://127.0.0.1:8000", "http://localhost:8001"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"urls": []}, "rollout.urls is empty"),
        ({"urls": ["127.0.0.1:8000"]}, "http://HOST:PORT"),
        ({"urls": ["http://127.0.0.1:8000"], "gpus": [1]}, "rollout.gpus is set"),
        ({"urls": ["http://127.0.0.1:8000"], "max_num_seqs": 8}, "rollout.max_num_seqs is set"),
        ({"urls": ["http://127.0.0.1:8000"], "data_parallel_size": 2}, "rollout.data_parallel_size is set"),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VLLMServerRollout(**arguments)


def test_typo_in_engine_args_is_refused(spec: PolicySpec) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine_args\.max_num_seqz .*Did you mean"):
        VLLMServerRollout(engine_args={"max_num_seqz": 2}).start(spec, PLACEMENT)


def test_names_of_arguments_are_those_of_vllms_classes() -> None:
    """They are read in its source. A server without the flag of the middleware would ask for no key."""
    from vllm.engine.arg_utils import EngineArgs

    assert vllm_argument_names() == set(EngineArgs.__dataclass_fields__)
    assert any(flag.startswith("--middleware=") for flag in frontend_flags())


def test_flags_are_read_back_as_they_were(spec: PolicySpec) -> None:
    """vLLM's own parser is the oracle."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = {
        **VLLMOptions(engine_args={"hf_overrides": {"rope_theta": 1e4}}).arguments(spec, PLACEMENT.device),
        "cudagraph_capture_sizes": [1, 2, 4],
        "weight_transfer_config": {"backend": OVER_NCCL},
    }
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(to_flags(arguments))
    for name, value in arguments.items():
        if name != "weight_transfer_config":
            assert getattr(parsed, name) == value, name
    assert parsed.weight_transfer_config.backend == OVER_NCCL


# ---- servers of our own -----------------------------------------------------------------------------------------


def test_server_that_is_killed(other: OtherServer, spec: PolicySpec, bucket: Bucket) -> None:
    """The other server starts beside."""
    engine = VLLMServerRollout(**SMALL)
    try:
        engine.start(spec, PLACEMENT)
        assert engine.update_weights(iter([bucket]), 1).num_tensors == len(bucket)
        before = tokens(engine.generate(requests("before"), GREEDY))
        server, *below = processes_of(engine)
        engine.submit(requests("short"), GREEDY)
        done = engine.collect(30.0)
        time.sleep(1.0)
        for process in map(psutil.Process, below):
            if process.name().startswith("VLLM"):
                process.suspend()  # no tokens from here on
        engine.submit(requests("long", 1), SamplingParams(2000))
        os.kill(server, signal.SIGKILL)
        with pytest.raises(EngineFault, match=r"ended with status 137.*server\.log") as fault:  # noqa: PT012
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                done += engine.collect(5.0)
        done += fault.value.completions
        assert sorted(c.request_id for c in done) == ["short/0", "short/1"]
        assert sorted(tokens(done)) == sorted(before)

        engine.close()
        engine.start(spec, PLACEMENT)
        engine.update_weights(iter([bucket]), 2)
        again = engine.generate(requests("again"), GREEDY)
        assert tokens(again) == before
        assert {completion.policy_version for completion in again} == {2}
        ours = processes_of(engine)
    finally:
        engine.close()
    assert len(ours) >= 3, "the API server, the engine's core, its worker"
    assert not running(ours)


def processes_of(engine: VLLMServerRollout) -> list[int]:
    """Return the processes of an engine's only server, the API server first."""
    assert engine._processes is not None
    (server,) = engine._processes._servers
    (keeper,) = psutil.Process(server.supervisor.pid).children()
    return [process.pid for process in keeper.children(recursive=True)]


def test_start_failure_shows_the_end_of_the_log(spec: PolicySpec) -> None:
    engine = VLLMServerRollout(engine_args={"quantization": "no-such-method"}, **SMALL)
    with pytest.raises(RunError, match=r"(?s)did not start.*server\.log.*no-such-method"):
        engine.start(spec, PLACEMENT)
    engine.close()


# ---- servers of somebody else -----------------------------------------------------------------------------------


def test_wrong_key_is_refused(theirs: VLLMServerRollout, spec: PolicySpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "wrong")
    with pytest.raises(RunError, match=f"refuses the key of {KEY}"):
        theirs.start(spec, PLACEMENT)


def test_a_server_that_takes_weights_in_another_way_is_refused(
    theirs: VLLMServerRollout, spec: PolicySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joining its group would wait until the deadline."""
    monkeypatch.setattr(server_module, "OVER_GLOO", "another")
    with pytest.raises(ConfigError, match=r"""--weight-transfer-config '\{"backend": "another"\}'"""):
        theirs.start(spec, PLACEMENT)


def test_a_server_that_rounds_recurrent_states_is_refused(
    theirs: VLLMServerRollout, spec: PolicySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slow decays its logprobs would be further from the trainer's than all else in bfloat16 makes them."""
    monkeypatch.setattr(server_module, "policy_weights", lambda policy: ["layers.0.linear_attn.A_log"])
    arguments, others = VLLMServerOptions.arguments, {"mamba_ssm_cache_dtype": "float16"}  # theirs has the documented
    monkeypatch.setattr(VLLMServerOptions, "arguments", lambda *given: arguments(*given) | others)
    with pytest.raises(ConfigError, match=r"recurrent states in 'float32'.*--mamba-ssm-cache-dtype float16"):
        theirs.start(spec, PLACEMENT)


@pytest.mark.parametrize("route", ["start_weight_update", "collective_rpc", "inference/v1/generate", "metrics"])
def test_every_route_asks_for_the_key(theirs: VLLMServerRollout, other: OtherServer, route: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(urllib.request.Request(f"{other.url}/{route}", data=b"{}", method="POST"))
    assert refusal.value.code == 401


def test_server_of_somebody_else(
    theirs: VLLMServerRollout, other: OtherServer, spec: PolicySpec, bucket: Bucket
) -> None:
    """Also a second time, after a trainer that left a sync open."""
    theirs.start(spec, PLACEMENT)
    theirs.update_weights(iter([bucket]), 1)
    first = tokens(theirs.generate(requests("first"), GREEDY))
    assert theirs._client is not None
    theirs._client.spawn(theirs._client.call("POST", f"{other.url}/start_weight_update")).result()
    theirs.close()

    theirs.start(spec, PLACEMENT)
    theirs.update_weights(iter([bucket]), 2)
    assert tokens(theirs.generate(requests("second"), GREEDY)) == first


def test_server_that_hangs(theirs: VLLMServerRollout, other: OtherServer, spec: PolicySpec, bucket: Bucket) -> None:
    theirs.start(spec, PLACEMENT)
    theirs.update_weights(iter([bucket]), 1)
    theirs.generate(requests("warm"), GREEDY)  # the first takes seconds
    theirs.close()
    theirs.request_deadline_s = 3.0
    theirs.start(spec, PLACEMENT)
    theirs.update_weights(iter([bucket]), 1)
    stopped = psutil.Process(other.process.pid).children(recursive=True)
    for process in stopped:
        process.suspend()
    try:
        began = time.monotonic()
        with pytest.raises(EngineFault, match=r"did not answer within rollout\.request_deadline_s 3 s"):
            theirs.generate(requests("hanging"), GREEDY)
        assert time.monotonic() - began < 6
    finally:
        for process in stopped:
            process.resume()
    theirs.close()
    theirs.start(spec, PLACEMENT)
    theirs.update_weights(iter([bucket]), 2)
    assert len(theirs.generate(requests("awake"), GREEDY)) == 2


def test_a_sync_ends_what_still_runs(
    theirs: VLLMServerRollout, other: OtherServer, spec: PolicySpec, bucket: Bucket
) -> None:
    """vLLM may hear of an abort only after a sync has begun: a forward pass without weights would kill the server."""
    theirs.start(spec, PLACEMENT)
    theirs.update_weights(iter([bucket]), 1)
    for attempt in range(10):  # on a busy machine the engine may be done before it hears of the sync
        theirs.submit([Request(f"running/{attempt}", (5, 9, 6), seed=0)], SamplingParams(2000))
        time.sleep(0.5)  # it generates by then; whether tokens have come depends on the machine
        theirs.update_weights(iter([bucket]), 2 + attempt)
        (cut,) = theirs.collect(60.0)
        if cut.finish_reason == "abort":
            break
    assert cut.finish_reason == "abort"
    assert len(theirs.generate(requests("after"), GREEDY)) == 2


def test_stats(theirs: VLLMServerRollout, spec: PolicySpec, bucket: Bucket) -> None:
    theirs.start(spec, PLACEMENT)
    theirs.update_weights(iter([bucket]), 1)
    theirs.stats()
    prompt = tuple(5 + index % 40 for index in range(300))
    for attempt in range(5):  # on a busy machine a server may answer only when it is done
        prompt = (attempt, *prompt)
        theirs.generate([Request(f"stats/{index}", prompt, index) for index in range(8)], SamplingParams(1500))
        stats = theirs.stats()
        assert stats["num_tokens"] == 12000
        if stats["running"]:
            break
    assert 0 < stats["tokens_per_s"] < 1e5
    assert 1 <= stats["running"] <= 8
    assert 0 < stats["kv_cache_use"] < 1
    assert stats["prefix_cache_hits"] > 0.5, "seven of eight equal prompts"
    assert theirs.stats()["num_tokens"] == 0


# ---- several ranks, and their end -------------------------------------------------------------------------------


def test_servers_of_two_ranks_end_with_the_trainer(folder: Path) -> None:
    (port,) = free_ports(1)
    script = Path(__file__).with_name("server_trainer.py")
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        first, second = (json.loads(next(line for line in rank.stdout or () if line[:1] == "{")) for rank in ranks)
        assert first["token_ids"] == second["token_ids"], "both ranks ask for the same, of the same weights"
        assert first["versions"] == second["versions"] == [4, 4, 4]
        assert first["num_tensors"] == second["num_tensors"] == 21
        assert set(second["stats"]) == {"num_tokens", "tokens_per_s"}
        assert first["stats"]["api_cpu"] > 0, "the API server is found by its command line"
        assert second["processes"] == []
        assert not first["has_imported_vllm"], "it changes the process that imports it"
        assert len(first["processes"]) >= 4, "the supervisor, the API server, the engine's core, its worker"
        assert running(first["processes"]) == first["processes"]
        ranks[0].kill()
        deadline = time.monotonic() + 20
        while (left := running(first["processes"])) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
