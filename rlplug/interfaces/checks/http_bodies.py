"""Bodies of HTTP answers, read to a limit: a server that sends without end takes no memory without end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp


class BodyTooLargeError(Exception):
    """A body is longer than its limit; the rest of it was not read."""


async def read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body of an answer.

    Raises:
        BodyTooLargeError: It has more than ``max_bytes`` bytes.
        aiohttp.ClientError: The connection broke.
    """
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise BodyTooLargeError
    return bytes(body)
