"""Requests to servers: sent in turn, streamed, aborted, and what a fault keeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rlplug_engines.colocated.stats import EngineStats
from rlplug_engines.servers.addresses import free_ports
from rlplug_engines.servers.backend import (
    BackendContext,
    EngineLabels,
    PendingRequest,
    SchedulerState,
    ServerBackend,
    ServerSettings,
)
from rlplug_engines.servers.http_client import HTTPClient, Server
from rlplug_engines.servers.process_group import Rendezvous
from rlplug_engines.servers.processes import Launch, ServerSlot
from rlplug_engines.servers.requests import ServerRequests
from rlplug_engines.servers.weight_sender import TensorList

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault, PolicySpec
from rlplug.types import Completion, Request, SamplingParams


class TinyBackend(ServerBackend):
    """Requests to ``tiny_server.py``; its servers take no weights."""

    labels = EngineLabels(engine="Tiny", colocated="TinyRollout", server_key="KEY")
    generate_route = "tokens"

    def __init__(self, arguments: dict[str, dict[str, Any]]) -> None:
        policy = PolicySpec("folder", torch.float32, (), 0, 100)
        super().__init__(None, BackendContext(policy, torch.device("cpu"), is_launched=False))
        self.arguments = arguments

    def payload(self, pending: PendingRequest) -> dict[str, Any]:
        return {"count": pending.max_tokens, **self.arguments[pending.request.request_id]}

    def receive(self, pending: PendingRequest, answer: dict[str, Any]) -> None:
        arguments = self.arguments[pending.request.request_id]
        if answer["token"] == arguments.get("bad"):
            raise RunError("a token that nobody wants")
        pending.append([answer["token"]], [] if arguments.get("no_logprobs") else [-1.0])
        pending.finish_reason = arguments.get("reason", "length") if answer["last"] else None
        pending.cached_prompt_tokens = 1

    async def abort(self, server: Server, pending: PendingRequest) -> None:
        await server.post("echo", {"stop": pending.name})

    def launch(self, slot: ServerSlot) -> Launch:
        raise NotImplementedError

    async def settings(self, server: Server) -> ServerSettings:
        raise NotImplementedError

    def metrics(self, answer: Any) -> SchedulerState:
        raise NotImplementedError

    async def join(self, server: Server, rendezvous: Rendezvous) -> None:
        raise NotImplementedError

    async def receive_weights(self, server: Server, tensors: TensorList, version: int) -> None:
        raise NotImplementedError

    async def finish(self, server: Server) -> None:
        raise NotImplementedError


@pytest.fixture
def stats() -> EngineStats:
    return EngineStats(8, 1000)


@pytest.fixture
def backend() -> TinyBackend:
    return TinyBackend({})


@pytest.fixture
def requests(backend: TinyBackend, client: HTTPClient, url: str, stats: EngineStats) -> ServerRequests:
    return ServerRequests(backend, client, [url], 0, 30.0, stats)


Pending = Callable[..., PendingRequest]


@pytest.fixture
def pending(backend: TinyBackend) -> Pending:
    """Makes requests, with arguments for the server."""

    def make(name: str, count: int, **arguments: Any) -> PendingRequest:
        backend.arguments[name] = arguments
        return PendingRequest(Request(name, (1, 2), 0), SamplingParams(count), count, version=3, is_streamed=True)

    return make


def collect(requests: ServerRequests, count: int) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    deadline = time.monotonic() + 30
    while len(done) < count and time.monotonic() < deadline:
        done |= {completion.request_id: completion for completion in requests.collect(1.0)}
    return done


def test_completions_come_in_the_order_of_the_requests(
    requests: ServerRequests, pending: Pending, stats: EngineStats
) -> None:
    completions = requests.generate([pending("slow", 3, pause=0.2), pending("fast", 5)])
    assert [(c.request_id, len(c.token_ids), c.policy_version) for c in completions] == [("slow", 3, 3), ("fast", 5, 3)]
    assert (stats.num_tokens, stats.prompt_tokens, stats.cached_prompt_tokens) == (8, 4, 2)
    assert 0.5 < stats.seconds < 20


def test_submitted_requests_are_collected_once(requests: ServerRequests, pending: Pending) -> None:
    requests.submit([pending("a", 2), pending("b", 3, pause=0.1)])
    done = collect(requests, 2)
    assert {name: len(c.token_ids) for name, c in done.items()} == {"a": 2, "b": 3}
    assert requests.collect(0.0) == []


def test_abort_keeps_what_came(requests: ServerRequests, pending: Pending, stats: EngineStats) -> None:
    requests.submit([pending("long", 1000, pause=0.1)])
    time.sleep(0.8)
    requests.abort(["long", "unknown"])
    partial = collect(requests, 1)["long"]
    assert partial.finish_reason == "abort"
    assert 0 < len(partial.token_ids) < 100
    assert partial.token_ids.tolist() == list(range(len(partial.token_ids)))
    assert not requests.is_busy
    assert stats.received_tokens == len(partial.token_ids)
    stats.generated_tokens = stats.received_tokens + 7
    found = stats.drain()
    assert (found["aborted"], found["lost_tokens"]) == (1, 7)  # what the server had not sent
    assert stats.drain()["aborted"] == 0


def test_the_deadline_of_a_request_begins_anew_with_each_answer_of_its_server(
    backend: TinyBackend, client: HTTPClient, url: str, stats: EngineStats, pending: Pending
) -> None:
    """Alone catches requests that fail because others ran before them, with nothing wrong: four of 1 s in 2 s."""
    requests = ServerRequests(backend, client, [url], 0, 2.0, stats)
    done = requests.generate([pending(f"{number}", 2, queued=True, pause=0.5) for number in range(4)])
    assert [len(each.token_ids) for each in done] == [2] * 4
    with pytest.raises(EngineFault, match=r"within rollout\.request_deadline_s 2 s, nor another request"):
        requests.generate([pending("hangs", 2, pause=60.0)])


def test_stream_that_breaks_off_is_a_fault(requests: ServerRequests, pending: Pending) -> None:
    requests.submit([pending("whole", 2), pending("half", 10, broken=True, pause=0.3)])
    assert set(collect(requests, 1)) == {"whole"}
    with pytest.raises(EngineFault, match=r"Tiny has 0 completions and failed: .* broke off .* after 5 tokens"):
        collect(requests, 1)


def test_refusal_is_raised_as_it_is(requests: ServerRequests, pending: Pending) -> None:
    with pytest.raises(RunError, match="a token that nobody wants") as error:
        requests.generate([pending("bad", 5, bad=2), pending("good", 5)])
    assert not isinstance(error.value, EngineFault)


def test_server_that_is_gone_is_a_fault(
    backend: TinyBackend, client: HTTPClient, stats: EngineStats, pending: Pending
) -> None:
    gone = f"http://127.0.0.1:{free_ports(1)[0]}"
    requests = ServerRequests(backend, client, [gone], 0, 30.0, stats)
    requests.submit([pending("lost", 5)])
    with pytest.raises(EngineFault, match="cannot be reached"):
        requests.collect(30.0)


def test_ranks_begin_with_different_servers(backend: TinyBackend, client: HTTPClient, stats: EngineStats) -> None:
    urls = ["http://a", "http://b", "http://c"]
    firsts = [next(ServerRequests(backend, client, urls, rank, 1.0, stats)._servers).url for rank in range(4)]
    assert firsts == ["http://a", "http://b", "http://c", "http://a"]


def test_tokens_without_logprobs_are_a_fault(requests: ServerRequests, pending: Pending, url: str) -> None:
    with pytest.raises(EngineFault, match=rf"{url} returned 0 logprobs for 1 tokens"):
        requests.generate([pending("silent", 2, no_logprobs=True)])


def test_unknown_finish_reason_is_no_completion(requests: ServerRequests, pending: Pending) -> None:
    with pytest.raises(RunError, match="request odd: Tiny ended it with finish reason 'error'"):
        requests.generate([pending("odd", 2, reason="error")])


def test_error_of_a_backend_reaches_the_caller(requests: ServerRequests, pending: Pending) -> None:
    """Also of a request for which nobody waits when it is sent."""
    requests.submit([pending("broken", 2, payload={1})])
    with pytest.raises(TypeError, match="not JSON serializable"):
        requests.collect(30.0)
