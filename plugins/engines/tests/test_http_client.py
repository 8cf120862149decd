"""Answers, refusals, and servers that are gone or late, as a client sees them."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from rlplug_engines.servers import http_client
from rlplug_engines.servers.addresses import free_ports
from rlplug_engines.servers.http_client import SILENT_S, HTTPClient, Server, ServerError, _socket_with_keepalive

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault


def test_json_goes_in_and_out_with_the_key(client: HTTPClient, url: str) -> None:
    answer = client.spawn(client.call("POST", f"{url}/echo", {"a": [1, 2]})).result()
    assert answer == {"got": {"a": [1, 2]}, "key": "Bearer a key"}


def test_many_calls_run_at_once(client: HTTPClient, url: str) -> None:
    futures = [client.spawn(client.call("POST", f"{url}/echo", {"n": n})) for n in range(200)]
    assert [future.result()["got"]["n"] for future in futures] == list(range(200))


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (400, RunError, "status 400: because"),
        (401, RunError, "refuses the key of MY_KEY: set it to the server's SERVER_KEY"),
        (500, ServerError, "status 500: because"),
    ],
)
def test_refusals_and_failures_differ(
    client: HTTPClient, url: str, status: int, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as error:
        client.run_all([Server(client, url).get(f"status/{status}")])
    assert isinstance(error.value, EngineFault) == (status >= 500)
    assert client.run_all([client.status(f"{url}/status/{status}")]) == [status]


def test_the_health_check_does_not_give_the_key_away(client: HTTPClient, url: str) -> None:
    """Before a server binds its port, anybody may answer there; this one is healthy for those without a key."""
    assert client.is_healthy(url)


def test_a_redirect_is_refused_with_prompts_and_key(client: HTTPClient, url: str) -> None:
    """Catches a client that takes prompts to, and completions from, wherever a server points."""
    with pytest.raises(RunError, match=r"redirects \(status 307\), which is not followed"):
        client.run_all([Server(client, url).post("elsewhere", {"prompt": "private"})])

    async def streamed() -> None:
        async for _ in client.stream(f"{url}/elsewhere", {}):
            pass

    with pytest.raises(RunError, match="redirects"):
        client.spawn(streamed()).result()


def test_an_event_without_end_takes_time_in_proportion(client: HTTPClient, url: str) -> None:
    """Catches each chunk being copied with all before it: 75 GiB of copies here, which take minutes."""

    async def streamed() -> None:
        async for _ in client.stream(f"{url}/endless", {}):
            pass

    began = time.process_time()
    client.spawn(streamed()).result()
    assert time.process_time() - began < 10


def test_late_answer_is_a_fault_that_names_the_option(client: HTTPClient, url: str) -> None:
    with pytest.raises(EngineFault, match=r"did not answer within rollout\.some_deadline_s 0\.2 s"):
        client.spawn(client.call("GET", f"{url}/slow", None, 0.2, "some_deadline_s")).result()


def test_server_that_is_gone_is_a_fault(client: HTTPClient) -> None:
    gone = f"http://127.0.0.1:{free_ports(1)[0]}"
    assert not client.is_healthy(gone)
    with pytest.raises(EngineFault, match="cannot be reached"):
        client.run_all([Server(client, gone).get("health")])


def test_streamed_events_come_whole(client: HTTPClient, url: str) -> None:
    assert [event["token"] for event in stream(client, url, count=20)] == list(range(20))


def test_error_in_a_stream_is_a_fault(client: HTTPClient, url: str) -> None:
    with pytest.raises(ServerError, match="failed: out of tokens"):
        stream(client, url, count=2, error=True)


def test_answers_and_events_without_end_are_faults(
    client: HTTPClient, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", 4)
    with pytest.raises(EngineFault, match=r"sent an answer of more than 0 MiB"):
        client.run_all([Server(client, url).get("status/400")])
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", -1)  # whatever a chunk leaves of an event is too much
    with pytest.raises(EngineFault, match=r"sent an answer of more than -1 MiB"):
        stream(client, url, count=2)


def test_close_cancels_what_runs_and_may_come_twice(client: HTTPClient, url: str) -> None:
    future = client.spawn(client.call("GET", f"{url}/slow", None, 60.0))
    client.close()
    client.close()
    assert future.cancelled()


def stream(client: HTTPClient, url: str, **payload: Any) -> list[Any]:
    async def read() -> list[Any]:
        return [event async for event in client.stream(f"{url}/tokens", payload)]

    return client.spawn(read()).result()


def test_routes_that_take_post(client: HTTPClient, url: str) -> None:
    server = Server(client, url)
    assert client.run_all([server.takes_post("echo"), server.takes_post("none"), server.takes_post("status/200")]) == [
        True,
        False,
        False,
    ]


def test_late_post_names_the_servers_timeout(client: HTTPClient, url: str) -> None:
    server = Server(client, url, 0.2, "sync_deadline_s")
    with pytest.raises(EngineFault, match=r"did not answer within rollout\.sync_deadline_s 0\.2 s"):
        client.run_all([server.post("slow")])


def test_connections_break_when_the_other_host_is_silent() -> None:
    """A network namespace whose interface went down was noticed after 29 s; it takes rights that tests do not have."""
    with _socket_with_keepalive((socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 9))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, between, count = (
            made.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"))
            for name in ("KEEPIDLE", "KEEPINTVL", "KEEPCNT")
        )
        assert idle + between * count == SILENT_S
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENT_S * 1000
