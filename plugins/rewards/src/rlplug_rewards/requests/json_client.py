"""HTTP client of rewards: POSTs JSON, tries again where that may help, and trusts nothing that comes back."""

from __future__ import annotations

import asyncio
import email.utils
import http
import ipaddress
import json
import math
import os
import random
import time
import urllib.request
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import aiohttp

from rlplug.errors import ConfigError, describe, encodable
from rlplug.timeouts import waiting
from rlplug_rewards.requests.counts import Counts
from rlplug_rewards.requests.limits import RequestLimits

Result = TypeVar("Result")

MAX_ANSWER_BYTES: Final = 4 << 20
"""Largest body of an answer."""
EXCERPT_CHARS: Final = 300
TRIED_AGAIN: Final = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
"""Statuses after which the same request may succeed; 529 says that a server is overloaded."""
PROBE_S: Final = 10.0


class RequestError(Exception):
    """A request got no usable answer. The text says why; it never has the key.

    Args:
        text: The reason.
        count: Name under which the failure is counted.
        may_pass: Whether the same request may succeed later.
        wait_s: Time that the server asks to wait, in seconds; ``None`` where it says nothing.
    """

    def __init__(self, text: str, count: str, may_pass: bool = False, wait_s: float | None = None) -> None:
        super().__init__(text)
        self.count, self.may_pass, self.wait_s = count, may_pass, wait_s


def malformed(text: str) -> RequestError:
    """Return the error of an answer that is not what was asked for."""
    return RequestError(text, "malformed")


class JSONClient:
    """Client of one server; its coroutines run on whatever event loop awaits them.

    Args:
        owner: Name of the reward's class and of its argument, such as ``Judge.endpoint``, for messages.
        url: Address without a slash at the end.
        api_key_env: Environment variable with the bearer token; ``None`` for none. The token is read at each request,
            kept nowhere, and removed from all messages.
        limits: Concurrency, retries and deadlines.
        counts: Counts requests, retries and failures by kind.
        plain_http: Whether a key may go to another host without encryption.
        use_proxy: Ask through the proxy that the environment names for the address; a proxy sees the token, unless the
            address has https.

    Raises:
        ConfigError: The address, or the proxy's, cannot be used.
    """

    def __init__(
        self,
        owner: str,
        url: str,
        api_key_env: str | None,
        limits: RequestLimits,
        counts: Counts,
        plain_http: bool = False,
        use_proxy: bool = False,
    ) -> None:
        self._owner = owner
        self.url = _checked_url(owner, url)
        if api_key_env is not None and not plain_http and not _hides_key(self.url):
            raise ConfigError(
                f"{owner}.url is {self.url}, and the key of {api_key_env} would cross the network in clear: give an "
                f"https address, or set {owner}.plain_http to true where the network is your own."
            )
        self._proxy = _proxy_of(owner, self.url) if use_proxy else None
        self.via = f" through the proxy {urlsplit(self._proxy).hostname}" if self._proxy else ""
        """Words for messages."""
        self._api_key_env = api_key_env
        self._limits = limits
        self._counts = counts
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._slots = weakref.WeakKeyDictionary()
        self._jitter = random.Random()

    def check(self, route: str) -> tuple[int, bytes]:
        """Ask the server for ``route`` once, so that a wrong address or key is found before the run works.

        Any answer of the server will do but a refused key; its status and body are returned.

        Raises:
            ConfigError: The key is not set or refused, or the server cannot be reached.
        """
        if self._api_key_env is not None and not os.environ.get(self._api_key_env):
            raise ConfigError(
                f"{self._owner}.api_key_env is {self._api_key_env!r}, and that environment variable is not set: export "
                "the key under that name, or set api_key_env to null for a server without one."
            )
        try:
            status, body = asyncio.run(self._probe(route))
        except RequestError as error:
            raise ConfigError(
                f"{self._owner}.url is {self.url}, and {error}. Start the server first, or correct the address"
                f"{self._proxy_hint()}."
            ) from None
        if status in (401, 403):
            raise ConfigError(
                f"{self._owner}.url is {self.url}, which refuses the key of {self._api_key_env or 'nobody'} (status "
                f"{status}): set {self._owner}.api_key_env to the variable that has its key."
            )
        return status, body

    async def post(self, route: str, payload: dict[str, Any], read: Callable[[Any], Result]) -> Result:
        """Return what ``read`` makes of the server's answer to a POST, trying again within the limits.

        Args:
            route: Path below the server's address.
            payload: The request's body.
            read: Reads the parsed JSON; raises :class:`RequestError` where it is not what was asked for.

        Raises:
            RequestError: There is no usable answer; the failure is counted.
        """
        failure: RequestError | None = None
        try:
            async with asyncio.timeout(self._limits.deadline_s) as clock, self._session() as session:
                for attempt in range(self._limits.max_retries + 1):
                    if failure is not None:
                        wait_s = self._backoff_s(attempt, failure)
                        if wait_s > _left(clock):
                            raise TimeoutError
                        await asyncio.sleep(wait_s)
                        self._counts.add(retries=1)
                    try:
                        async with self._slot(clock):  # not held while a request waits to be tried again
                            self._counts.add(requests=1)
                            body = await self._exchange(session, "POST", route, payload)
                        return read(parsed(body))
                    except RequestError as error:
                        self._counts.add(**{error.count: 1})
                        failure = error
                        if not error.may_pass:
                            break
        except TimeoutError:
            self._counts.add(gave_up=1)
            after = f"; before that, {failure}" if failure is not None else ""
            raise RequestError(
                f"{self.url} gave no usable answer within deadline_s {self._limits.deadline_s:g} s{after}", "gave_up"
            ) from None
        assert failure is not None
        self._counts.add(gave_up=1)
        tries = f" (the last of {self._limits.max_retries + 1} requests)" if failure.may_pass else ""
        raise RequestError(f"{failure}{tries}", failure.count) from None

    def _proxy_hint(self) -> str:
        """Return what to do where the environment names a proxy that is not asked."""
        is_named = self._proxy is None and _named_proxy(self.url) is not None
        return f", or set {self._owner}.use_proxy: the environment names a proxy, which is not asked" * is_named

    # ---- one request ------------------------------------------------------------------------------------------------

    async def _probe(self, route: str) -> tuple[int, bytes]:
        async with self._session() as session:
            return await self._answer(session, "GET", route, None, PROBE_S)

    def _session(self) -> aiohttp.ClientSession:
        key = os.environ.get(self._api_key_env, "") if self._api_key_env else ""
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        # a retry must not run into the end of the connection before; no cookies, and no body that unpacks to gigabytes
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        return aiohttp.ClientSession(
            connector=connector, headers=headers, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        )

    @asynccontextmanager
    async def _slot(self, clock: asyncio.Timeout) -> AsyncIterator[None]:
        """Hold a place for a request; the wait for it counts in no deadline."""
        loop = asyncio.get_running_loop()
        slots = self._slots.setdefault(loop, asyncio.Semaphore(self._limits.max_concurrency))
        left = _left(clock)
        clock.reschedule(None)
        with waiting():
            await slots.acquire()
        clock.reschedule(loop.time() + left)
        try:
            yield
        finally:
            slots.release()

    async def _exchange(
        self, session: aiohttp.ClientSession, method: str, route: str, payload: dict[str, Any]
    ) -> bytes:
        """Return the body of an answer with status 200."""
        status, body = await self._answer(session, method, route, payload, self._limits.request_deadline_s)
        if status == 200:
            return body
        excerpt = self._excerpt(body)
        if 300 <= status < 400:
            raise RequestError(
                f"{self.url} redirects (status {status}): give its final address, since a key is sent nowhere else",
                "refused",
            )
        name = http.HTTPStatus(status).phrase if status in list(http.HTTPStatus) else "no standard status"
        text = f"{self.url} answered with status {status} ({name}){': ' if excerpt else ''}{excerpt}"
        raise RequestError(text, "rate_limited" if status == 429 else "server_errors" if status >= 500 else "refused")

    async def _answer(
        self, session: aiohttp.ClientSession, method: str, route: str, payload: Any, deadline_s: float
    ) -> tuple[int, bytes]:
        """Return status and body of an answer.

        Raises:
            RequestError: There is none, it is no JSON by its own account, or the server asks to try again.
        """
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        try:
            async with session.request(
                method, f"{self.url}/{route}", json=payload, timeout=timeout, allow_redirects=False, proxy=self._proxy
            ) as response:
                body = await _body(response, self.url)
                if response.status in TRIED_AGAIN:
                    raise self._passing(response, body)
                if response.status == 200:
                    _check_type(response, self.url)
                return response.status, body
        except TimeoutError:
            raise RequestError(f"{self.url} did not answer within {deadline_s:g} s", "timeouts", True) from None
        except (OSError, aiohttp.ClientError) as problem:
            text = self._without_key(describe(problem))
            raise RequestError(f"{self.url} cannot be reached{self.via}: {text}", "failed_connections", True) from None

    def _passing(self, response: aiohttp.ClientResponse, body: bytes) -> RequestError:
        status, excerpt = response.status, self._excerpt(body)
        text = f"{self.url} answered with status {status}{': ' if excerpt else ''}{excerpt}"
        count = "rate_limited" if status == 429 else "server_errors"
        return RequestError(text, count, True, retry_after_s(response.headers.get("Retry-After")))

    def _backoff_s(self, attempt: int, failure: RequestError) -> float:
        """Return a random time up to twice the last bound, or what the server asks for, in seconds.

        Full jitter: aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter (2015).
        """
        bound = min(self._limits.max_backoff_s, self._limits.first_backoff_s * 2 ** (attempt - 1))
        jitter = self._jitter.uniform(0, bound)
        return jitter if failure.wait_s is None else failure.wait_s + jitter

    def _excerpt(self, body: bytes) -> str:
        text = self._without_key(body[: 16 * EXCERPT_CHARS].decode(errors="replace"))
        return " ".join(text.split())[:EXCERPT_CHARS]

    def _without_key(self, text: str) -> str:
        key = os.environ.get(self._api_key_env, "") if self._api_key_env else ""
        return encodable(text.replace(key, "[key]") if key else text)


def _left(clock: asyncio.Timeout) -> float:
    """Return the seconds until a timeout that is set."""
    ends_at = clock.when()
    assert ends_at is not None
    return ends_at - asyncio.get_running_loop().time()


async def _body(response: aiohttp.ClientResponse, url: str) -> bytes:
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise malformed(f"{url} compressed its answer, which was not asked for")
    try:
        await response.content.readexactly(MAX_ANSWER_BYTES + 1)
    except asyncio.IncompleteReadError as body:
        return body.partial
    raise malformed(f"{url} sent an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")


def _check_type(response: aiohttp.ClientResponse, url: str) -> None:
    kind = response.content_type
    if kind != "application/json" and not kind.endswith("+json"):
        raise malformed(f"{url} answered with {kind[:100]}, not with JSON")


def parsed(body: bytes) -> Any:
    """Return the value of a body that is strict JSON.

    Raises:
        RequestError: It is not.
    """
    try:
        return strict_json(body.decode())
    except (ValueError, RecursionError) as problem:
        raise malformed(f"the answer is not JSON: {describe(problem)}") from None


def strict_json(text: str) -> Any:
    """Return the value of a JSON text without NaN, infinities, or a key that stands twice in an object.

    Raises:
        ValueError: It is not such a text.
        RecursionError: It has too many levels of brackets.
    """
    return json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_object)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is no finite number")
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in an object")
    return found


def retry_after_s(value: str | None) -> float | None:
    """Return the seconds of a ``Retry-After`` header (RFC 9110, 10.2.3), or ``None`` where it says nothing readable."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _hides_key(url: str) -> bool:
    """Return whether nobody between here and a server reads what is sent: with TLS, or on this host."""
    parts = urlsplit(url)
    try:
        is_here = ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        is_here = parts.hostname == "localhost"
    return parts.scheme == "https" or is_here


def _named_proxy(url: str) -> str | None:
    """Return the address of the proxy that the environment names for a URL, if any."""
    parts = urlsplit(url)
    is_direct = urllib.request.proxy_bypass(parts.netloc)
    return None if is_direct else urllib.request.getproxies().get(parts.scheme)


def _proxy_of(owner: str, url: str) -> str | None:
    proxy = _named_proxy(url)
    if proxy is not None and urlsplit(proxy).scheme not in ("http", "https"):
        variable = f"{urlsplit(url).scheme}_proxy"
        raise ConfigError(
            f"{owner}.use_proxy reads the environment variable {variable}, whose proxy is not one of HTTP: give "
            "an address such as http://proxy:3128."
        )
    return proxy


def _checked_url(owner: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_usable = False
    if not is_usable or parts.query or parts.fragment:
        raise ConfigError(
            f"{owner}.url is {'an address' if '@' in url else repr(url)} that cannot be used: give one such as "
            "http://127.0.0.1:8000/v1, without ? and #."
        )
    if parts.username or parts.password:
        raise ConfigError(f"{owner}.url has a user or password in it: name the variable of a key in api_key_env.")
    return url.rstrip("/")
