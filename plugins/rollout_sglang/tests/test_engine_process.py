"""The process of SGLang, with a double of its engine: messages, faults, and what is left when it ends."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_double import DIES, FAILS
from processes import wait_until_gone
from rlplug_engines.colocated import EngineProcess, EngineStats
from rlplug_rollout_sglang.engine_requests import SGLangRequests
from rlplug_rollout_sglang.options import ENVIRONMENT

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault, PolicySpec
from rlplug.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.kit

DOUBLE = (sys.executable, str(Path(__file__).with_name("engine_double.py")))
SPEC = PolicySpec("folder", torch.bfloat16, eos_token_ids=(1, 7), pad_token_id=0, max_context=4096)
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that torchrun started; the double finds this plugin where the tests do."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


@pytest.fixture
def process() -> Iterator[EngineProcess]:
    process = EngineProcess("SGLang", DOUBLE, ENVIRONMENT, {}, DEADLINE_S)
    yield process
    process.close()


@pytest.fixture
def requests(process: EngineProcess) -> SGLangRequests:
    """Requests to an engine that has weights of version 4."""
    process.call("update_weights", [b"good"], "4", deadline_s=DEADLINE_S)
    stats = EngineStats(max_num_seqs=8, kv_cache_tokens=process.about["kv_cache_tokens"])
    requests = SGLangRequests(process, SPEC, 1000, stats, deadline_s=DEADLINE_S)
    requests.version = 4
    return requests


def asked(name: str, *lengths: int, first: int = 10) -> list[Request]:
    return [Request(f"{name}/{i}", (first, i), seed=i, max_new_tokens=length) for i, length in enumerate(lengths)]


def collected(requests: SGLangRequests, count: int) -> dict[str, Completion]:
    """Collect so many completions, by request."""
    completions: dict[str, Completion] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(completions) < count:
        assert time.monotonic() < deadline, f"{len(completions)} of {count} came"
        for completion in requests.collect(1.0):
            assert completion.request_id not in completions
            completions[completion.request_id] = completion
    return completions


# ---- requests -------------------------------------------------------------------------------------------------------


def test_completions_come_in_the_order_of_requests(requests: SGLangRequests) -> None:
    completions = requests.generate(asked("a", 30, 1, 9), SamplingParams(20))
    assert [c.request_id for c in completions] == ["a/0", "a/1", "a/2"]
    assert [len(c.token_ids) for c in completions] == [20, 1, 9]
    assert completions[2].token_ids.tolist() == list(range(3, 12))
    assert {c.policy_version for c in completions} == {4}
    assert requests.generate([], SamplingParams(4)) == []


def test_numbers_are_counted(process: EngineProcess, requests: SGLangRequests) -> None:
    requests.generate(asked("a", 150, 1), SamplingParams(200))
    metrics = requests.stats.drain()
    assert metrics["num_tokens"] == 151
    assert metrics["prefix_cache_hits"] == 0.5
    assert 0 < metrics["tokens_per_s"] < 151 / 1.5
    assert metrics["running"] == 3
    assert metrics["waiting"] == 1
    assert metrics["kv_cache_use"] == 0.25


def test_prompt_without_room_is_refused_and_nothing_is_sent(requests: SGLangRequests) -> None:
    too_long = Request("long", tuple(range(1000)), seed=1)
    with pytest.raises(RunError, match="request long"):
        requests.generate([*asked("a", 3), too_long], SamplingParams(4))
    assert len(requests.generate(asked("a", 3), SamplingParams(4))) == 1


def test_submitted_requests_run_beside_those_of_generate(requests: SGLangRequests) -> None:
    parts = [asked(f"thread {index}", 5, 6) for index in range(4)]
    threads = [threading.Thread(target=requests.submit, args=(part, SamplingParams(9))) for part in parts]
    for thread in threads:
        thread.start()
    assert len(requests.generate(asked("a", 20), SamplingParams(20))) == 1
    for thread in threads:
        thread.join()
    assert set(collected(requests, 8)) == {request.request_id for part in parts for request in part}
    assert requests.collect(0.0) == []


def test_collect_returns_by_its_deadline(requests: SGLangRequests) -> None:
    requests.submit(asked("long", 900), SamplingParams(900))
    began = time.monotonic()
    assert requests.collect(0.2) == []
    assert time.monotonic() - began < 5
    requests.abort(["long/0"])
    assert collected(requests, 1)["long/0"].finish_reason == "abort"


def test_abort_that_overtakes_its_request_is_heard(requests: SGLangRequests) -> None:
    requests.submit(asked("a", 900, 5), SamplingParams(900))
    requests.abort(["a/0"])
    completions = collected(requests, 2)
    assert completions["a/0"].finish_reason == "abort"
    assert len(completions["a/0"].token_ids) < 900
    assert len(completions["a/0"].logprobs) == len(completions["a/0"].token_ids)
    assert (completions["a/1"].finish_reason, len(completions["a/1"].token_ids)) == ("length", 5)


def test_abort_of_what_is_done_changes_nothing(requests: SGLangRequests) -> None:
    requests.submit(asked("a", 2), SamplingParams(5))
    collected(requests, 1)
    requests.abort(["a/0", "never"])
    requests.submit(asked("a", 2), SamplingParams(5))
    assert collected(requests, 1)["a/0"].finish_reason == "length"


def test_weights_of_another_version_are_noticed(requests: SGLangRequests) -> None:
    requests.version = 5
    with pytest.raises(RunError, match="weights of version 4, and the policy has version 5"):
        requests.generate(asked("a", 2), SamplingParams(5))


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_process_that_dies_is_a_fault_that_keeps_what_is_done(process: EngineProcess, requests: SGLangRequests) -> None:
    requests.submit(asked("done", 1), SamplingParams(5))
    child = process.about["max_num_seqs"]
    later = threading.Timer(1.0, requests.submit, (asked("bad", 3, first=DIES), SamplingParams(5)))
    later.start()
    with pytest.raises(EngineFault, match=r"has 1 of 2 completions .* exit code 7(.|\n)*illegal memory") as fault:
        requests.generate(asked("a", 2, 900), SamplingParams(900))
    later.join()
    assert [completion.request_id for completion in fault.value.completions] == ["a/0"]
    process.close()
    process.close()
    wait_until_gone(child)


def test_request_that_fails_is_a_fault(requests: SGLangRequests) -> None:
    with pytest.raises(EngineFault, match=r"request a/0: ValueError: no such thing"):
        requests.generate(asked("a", 2, first=FAILS), SamplingParams(5))


def test_deadline_is_a_fault(requests: SGLangRequests) -> None:
    requests.deadline_s = 0.3
    with pytest.raises(EngineFault, match=r"1 of 2 completions.*generate_deadline_s 0\.3") as fault:
        requests.generate(asked("a", 1, 900), SamplingParams(900))
    assert len(fault.value.completions) == 1


def test_bucket_that_is_refused_is_a_fault(process: EngineProcess) -> None:
    with pytest.raises(EngineFault, match="the bucket is bad"):
        process.call("update_weights", [b"bad"], "5", deadline_s=DEADLINE_S)


def test_cache_that_is_not_flushed_is_a_fault(process: EngineProcess, requests: SGLangRequests) -> None:
    process.call("end_update", deadline_s=DEADLINE_S)
    requests.submit(asked("a", 900), SamplingParams(900))
    time.sleep(0.5)
    with pytest.raises(EngineFault, match="the cache was not flushed: requests still run"):
        process.call("end_update", deadline_s=DEADLINE_S)
