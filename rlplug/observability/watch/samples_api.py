"""JSON of samples and of their tokens."""

from __future__ import annotations

from aiohttp import web


def routes() -> list[web.RouteDef]:
    """Return the routes below ``/api/runs/{run}/``."""
    return []
