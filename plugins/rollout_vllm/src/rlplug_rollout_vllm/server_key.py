"""A server's key, asked for on every route: runs in vLLM's API server."""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

OPEN = "/health"


class RequireKey:
    """ASGI middleware that refuses what comes without ``VLLM_API_KEY``, but for ``/health``.

    vLLM itself asks for the key below ``/v1`` and ``/inference`` alone, not where weights are changed
    (https://docs.vllm.ai/en/latest/usage/security/#api-key-authentication-limitations).
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] != OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self._expected):
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b"this server wants its key"})
                return
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)
