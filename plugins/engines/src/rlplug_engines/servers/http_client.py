"""HTTP client of the servers: JSON in and out, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from rlplug.errors import RunError, describe
from rlplug.interfaces import EngineFault
from rlplug_engines.colocated.loop import EngineLoop

Result = TypeVar("Result")

MAX_FILES: Final = 65536
"""Open connections: each request takes one, and a rollout has thousands."""

PROBE_S: Final = 30.0
"""Timeout of a call that takes a server no work."""

HEALTH_S: Final = 5.0

METHOD_NOT_ALLOWED: Final = 405

SILENT_S: Final = 30
"""Time in seconds after which a connection whose other host answers nothing at all counts as broken: a lost host closes
no connection, and a request may run for much longer."""

MAX_ANSWER_BYTES: Final = 256 << 20
"""Largest answer, or event of a stream; a completion of a million tokens takes a quarter of it."""


class ServerError(EngineFault):
    """A server failed: it answered with a status from 500."""


class HTTPClient:
    """Calls any number of servers at once. Coroutines run with ``spawn``; other methods may be called from any thread.

    Args:
        keys: Bearer token of each server by its URL; empty for none. No server is given another's.
        key_name: Environment variable that they come from, for messages.
        server_key: The servers' own name for it, for messages.
    """

    def __init__(self, keys: Mapping[str, str], key_name: str, server_key: str) -> None:
        self._headers: dict[str, dict[str, str]] = {}
        self.add_keys(keys)
        self._key_name = key_name
        self._server_key = server_key
        _allow_files()
        self._loop = EngineLoop("the servers")
        self._session = self.spawn(self._open()).result()

    @staticmethod
    async def _open() -> aiohttp.ClientSession:
        # A connection for each call: a busy server closes one that was idle for some seconds also when a request is on
        # its way, since libuv looks at timers first (docs.libuv.org/en/v1.x/design.html).
        connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_socket_with_keepalive)
        return aiohttp.ClientSession(connector=connector)

    def add_keys(self, keys: Mapping[str, str]) -> None:
        """Take the keys of further servers, or of others at the same URLs."""
        self._headers |= {f"{url}/": {"Authorization": f"Bearer {key}"} for url, key in keys.items() if key}

    def spawn(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine in the loop; those of one thread begin in the order of the calls."""
        return self._loop.spawn(coroutine)

    def run_all(self, coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
        """Run coroutines at once, and return their results in order, or raise the first of their errors."""
        return [future.result() for future in [self.spawn(coroutine) for coroutine in coroutines]]

    def close(self) -> None:
        """Cancel all calls, and close all connections."""
        if self._loop.is_closed:
            return
        self.spawn(self._close()).result()
        self._loop.close()

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()

    # ---- calls ----------------------------------------------------------------------------------------------------

    def is_healthy(self, url: str) -> bool:
        """Return whether the server at a URL is ready for requests.

        It is not given the key: any process may listen there while the server has not bound its port.
        """
        try:
            return self.spawn(self._exchange("GET", f"{url}/health", None, HEALTH_S, has_key=False)).result()[0] == 200
        except (OSError, aiohttp.ClientError):
            return False

    async def status(self, url: str) -> int:
        """Return the status of a GET: 405 for a route that takes POST alone, 404 for one that does not exist."""
        with self._failures(url, PROBE_S, ""):
            return (await self._exchange("GET", url, None, PROBE_S))[0]

    async def call(
        self,
        method: str,
        url: str,
        payload: dict[str, Any] | None = None,
        deadline_s: float | None = PROBE_S,
        deadline_key: str = "",
    ) -> Any:
        """Return a server's answer: parsed JSON, or text.

        Args:
            deadline_s: ``None`` where the caller ends it.
            deadline_key: The option that sets the deadline, for messages.

        Raises:
            RunError: It refuses the request.
            ServerError: It failed.
            EngineFault: It cannot be reached, does not answer by the deadline, or answers with broken JSON.
        """
        with self._failures(url, deadline_s, deadline_key):
            status, text = await self._exchange(method, url, payload, deadline_s)
            if status != 200:
                raise self._refusal(url, status, text)
            return msgspec.json.decode(text) if text[:1] in ("{", "[") else text

    async def stream(self, url: str, payload: dict[str, Any]) -> AsyncIterator[Any]:
        """Yield the server-sent events that answer a POST, parsed, without a deadline; errors are those of ``call``."""
        pieces: list[bytes] = []  # of the line that has not ended
        num_bytes = 0
        with self._failures(url, None, ""):
            async with self._request("POST", url, payload, None) as response:
                if response.status != 200:
                    raise self._refusal(url, response.status, await _text_of(response, url))
                async for chunk in response.content.iter_any():
                    *lines, rest = chunk.split(b"\n")
                    if lines:
                        lines[0] = b"".join([*pieces, lines[0]])
                        pieces, num_bytes = [], 0
                    pieces.append(rest)
                    num_bytes += len(rest)
                    if num_bytes > MAX_ANSWER_BYTES:
                        raise _too_large(url)
                    for line in lines:
                        event = line.removeprefix(b"data: ")
                        if event[:1] == b"{":
                            yield self._checked(url, msgspec.json.decode(event))

    @staticmethod
    def _checked(url: str, event: dict[str, Any]) -> dict[str, Any]:
        if "error" in event:
            raise ServerError(f"{url} failed: {str(event['error'])[:1000]}")
        return event

    async def _exchange(
        self, method: str, url: str, payload: Any, deadline_s: float | None, has_key: bool = True
    ) -> tuple[int, str]:
        async with self._request(method, url, payload, deadline_s, has_key) as response:
            return response.status, await _text_of(response, url)

    def _request(
        self, method: str, url: str, payload: Any, deadline_s: float | None, has_key: bool = True
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Return a request that goes nowhere else: prompts and weights would follow a redirect."""
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        own = (each for server, each in self._headers.items() if has_key and url.startswith(server))
        headers = next(own, None)
        return self._session.request(method, url, json=payload, timeout=timeout, headers=headers, allow_redirects=False)

    def _refusal(self, url: str, status: int, text: str) -> RunError:
        if status == 401:
            return RunError(f"{url} refuses the key of {self._key_name}: set it to the server's {self._server_key}.")
        if 300 <= status < 400:
            return RunError(f"{url} redirects (status {status}), which is not followed: give the server's own address.")
        message = f"{url} answered with status {status}: {text[:1000]}"
        return ServerError(message) if status >= 500 else RunError(message)

    @contextlib.contextmanager
    def _failures(self, url: str, deadline_s: float | None, deadline_key: str) -> Iterator[None]:
        """Raise a connection's errors as ``EngineFault``."""
        try:
            yield
        except TimeoutError:
            name = f"rollout.{deadline_key} " if deadline_key else ""
            limit = f"{SILENT_S} s" if deadline_s is None else f"{name}{deadline_s:g} s"
            raise EngineFault(f"{url} did not answer within {limit}.") from None
        except (OSError, aiohttp.ClientError) as problem:
            raise EngineFault(f"{url} cannot be reached: {describe(problem)}.") from problem
        except (ValueError, RecursionError) as problem:
            raise EngineFault(f"{url} answered with what is not JSON: {describe(problem)}.") from problem


async def _text_of(response: aiohttp.ClientResponse, url: str) -> str:
    """Return the body of a response as text; it must be of a sensible size."""
    try:
        await response.content.readexactly(MAX_ANSWER_BYTES + 1)
    except asyncio.IncompleteReadError as body:
        return body.partial.decode(errors="replace")
    raise _too_large(url)


def _too_large(url: str) -> EngineFault:
    return EngineFault(f"{url} sent an answer of more than {MAX_ANSWER_BYTES >> 20} MiB.")


@dataclass(frozen=True)
class Server:
    """One server of an engine.

    Args:
        client: Calls it.
        url: Its address, without a slash at the end.
        timeout_s: For the answer to a POST.
        timeout_key: The option that sets the timeout, for messages; empty for none.
    """

    client: HTTPClient
    url: str
    timeout_s: float = PROBE_S
    timeout_key: str = ""

    async def get(self, route: str) -> Any:
        """Return the answer to a GET; errors are those of :meth:`HTTPClient.call`."""
        return await self.client.call("GET", f"{self.url}/{route}")

    async def post(self, route: str, payload: dict[str, Any] | None = None) -> Any:
        """Return the answer to a POST; errors are those of :meth:`HTTPClient.call`."""
        return await self.client.call("POST", f"{self.url}/{route}", payload, self.timeout_s, self.timeout_key)

    async def takes_post(self, route: str) -> bool:
        """Return whether the server has a route that takes POST alone."""
        return await self.client.status(f"{self.url}/{route}") == METHOD_NOT_ALLOWED


def _socket_with_keepalive(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket for an address, which notices a host that is gone (tcp(7))."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        for name, value in (("KEEPIDLE", SILENT_S // 3), ("KEEPINTVL", SILENT_S // 6), ("KEEPCNT", 4)):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
    return made


def _allow_files() -> None:
    """Raise this process's limit of open files, which connections count towards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
