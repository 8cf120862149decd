"""Requests to servers: sent in turn, streamed, aborted, and what a fault keeps."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault
from rlplug.rollout.engines.stats import EngineStats
from rlplug.rollout.servers.addresses import free_ports
from rlplug.rollout.servers.http_client import HTTPClient
from rlplug.rollout.servers.requests import Job, RequestAdapter, ServerRequests
from rlplug.types import Completion, Request, SamplingParams


class TinyDialect(RequestAdapter):
    """Of ``tiny_server.py``."""

    engine = "Tiny"
    route = "tokens"

    def question(self, job: Job) -> dict[str, Any]:
        return job.arguments

    def receive(self, job: Job, answer: dict[str, Any]) -> None:
        if answer["token"] == job.arguments.get("bad"):
            raise RunError("a token that nobody wants")
        job.token_ids.append(answer["token"])
        job.logprobs.append(-1.0)
        job.finish_reason = "length" if answer["last"] else None
        job.cached_prompt_tokens = 1

    def completion(self, job: Job) -> Completion:
        reason: Any = job.finish_reason
        return Completion(job.request.request_id, tuple(job.token_ids), tuple(job.logprobs), reason, job.version)

    def abort(self, job: Job) -> tuple[str, dict[str, Any]]:
        return "echo", {"stop": job.name}


@pytest.fixture
def stats() -> EngineStats:
    return EngineStats(8, 1000)


@pytest.fixture
def requests(client: HTTPClient, url: str, stats: EngineStats) -> ServerRequests:
    return ServerRequests(client, [url], 0, 30.0, stats, TinyDialect())


def job(name: str, count: int, **arguments: Any) -> Job:
    return Job(Request(name, (1, 2), 0), SamplingParams(count), {"count": count, **arguments}, 3, is_streamed=True)


def collect(requests: ServerRequests, count: int) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    deadline = time.monotonic() + 30
    while len(done) < count and time.monotonic() < deadline:
        done |= {completion.request_id: completion for completion in requests.collect(1.0)}
    return done


def test_completions_come_in_the_order_of_the_jobs(requests: ServerRequests, stats: EngineStats) -> None:
    completions = requests.generate([job("slow", 3, pause=0.2), job("fast", 5)])
    assert [(c.request_id, len(c.token_ids), c.policy_version) for c in completions] == [("slow", 3, 3), ("fast", 5, 3)]
    assert (stats.num_tokens, stats.prompt_tokens, stats.cached_prompt_tokens) == (8, 4, 2)
    assert 0.5 < stats.seconds < 20


def test_submitted_requests_are_collected_once(requests: ServerRequests) -> None:
    requests.submit([job("a", 2), job("b", 3, pause=0.1)])
    done = collect(requests, 2)
    assert {name: len(c.token_ids) for name, c in done.items()} == {"a": 2, "b": 3}
    assert requests.collect(0.0) == []


def test_abort_keeps_what_came(requests: ServerRequests) -> None:
    requests.submit([job("long", 1000, pause=0.1)])
    time.sleep(0.8)
    requests.abort(["long", "unknown"])
    partial = collect(requests, 1)["long"]
    assert partial.finish_reason == "abort"
    assert 0 < len(partial.token_ids) < 100
    assert partial.token_ids == tuple(range(len(partial.token_ids)))
    assert not requests.is_busy


def test_stream_that_breaks_off_is_a_fault(requests: ServerRequests) -> None:
    requests.submit([job("whole", 2), job("half", 10, broken=True, pause=0.3)])
    assert set(collect(requests, 1)) == {"whole"}
    with pytest.raises(EngineFault, match=r"Tiny has 0 completions and failed: .* broke off .* after 5 tokens"):
        collect(requests, 1)


def test_refusal_is_raised_as_it_is(requests: ServerRequests) -> None:
    with pytest.raises(RunError, match="a token that nobody wants") as error:
        requests.generate([job("bad", 5, bad=2), job("good", 5)])
    assert not isinstance(error.value, EngineFault)


def test_server_that_is_gone_is_a_fault(client: HTTPClient, stats: EngineStats) -> None:
    gone = f"http://127.0.0.1:{free_ports(1)[0]}"
    requests = ServerRequests(client, [gone], 0, 30.0, stats, TinyDialect())
    requests.submit([job("lost", 5)])
    with pytest.raises(EngineFault, match="cannot be reached"):
        requests.collect(30.0)


def test_ranks_begin_with_different_servers(client: HTTPClient, stats: EngineStats) -> None:
    urls = ["http://a", "http://b", "http://c"]
    firsts = [next(ServerRequests(client, urls, rank, 1.0, stats, TinyDialect())._urls) for rank in range(4)]
    assert firsts == ["http://a", "http://b", "http://c", "http://a"]
