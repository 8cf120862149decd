"""A server for tests of clients: it answers what its routes are named for.

python tiny_server.py PORT
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

from aiohttp import web

TURN = asyncio.Lock()


async def echo(request: web.Request) -> web.Response:
    return web.json_response({"got": await request.json(), "key": request.headers.get("Authorization")})


async def tokens(request: web.Request) -> web.StreamResponse:
    """Stream as many events as are asked for, with a pause between them; ``broken`` ends after the first half."""
    asked = await request.json()
    async with TURN if asked.get("queued") else contextlib.nullcontext():  # one at a time
        return await stream_tokens(request, asked)


async def stream_tokens(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    count = asked["count"] // 2 if asked.get("broken") else asked["count"]
    for index in range(count):
        event = b"data: " + json.dumps({"token": index, "last": index == asked["count"] - 1}).encode() + b"\n\n"
        await response.write(event[:5])  # in pieces, as networks do
        await response.write(event[5:])
        await asyncio.sleep(asked.get("pause", 0.0))
    if asked.get("error"):
        await response.write(b'data: {"error": "out of tokens"}\n\n')
    await response.write(b"data: [DONE]\n\n")
    return response


async def slow(_: web.Request) -> web.Response:
    await asyncio.sleep(60)
    return web.Response()


async def elsewhere(request: web.Request) -> web.Response:
    """Redirect to /echo, which is anybody's."""
    raise web.HTTPTemporaryRedirect("/echo")


async def endless(request: web.Request) -> web.StreamResponse:
    """Stream 24 MiB without a line's end, in small chunks."""
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(24 * 256):
        await response.write(b"x" * 4096)
    return response


async def health(request: web.Request) -> web.Response:
    return web.Response(status=500 if "Authorization" in request.headers else 200)


async def status(request: web.Request) -> web.Response:
    return web.Response(status=int(request.match_info["status"]), text="because")


def main() -> None:
    app = web.Application()
    app.add_routes(
        [web.post("/echo", echo), web.post("/tokens", tokens), web.get("/slow", slow), web.post("/slow", slow)]
    )
    app.add_routes([web.get("/status/{status}", status)])
    app.add_routes([web.get("/health", health), web.post("/elsewhere", elsewhere), web.post("/endless", endless)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
