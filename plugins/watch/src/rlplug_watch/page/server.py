"""Server of the page: its static files, JSON under ``/api``, and the checks of requests to both."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from rlplug_watch.hosts import allowed_hosts, is_own
from rlplug_watch.page import api, samples_api
from rlplug_watch.page.folders import RUNS, Runs
from rlplug_watch.report.page import plotly_js

HEADERS: Final = {
    # Plotly writes styles into its figures; scripts come from files of this server alone.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
OWN: Final = Path(__file__).parent / "static"
SHARED: Final = Path(__file__).parent.parent / "report"
"""The report's folder, whose style sheet and charts the page uses."""
SHARED_FILES: Final = ("report.css", "charts.js")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(runs_dir: Path, host: str = "127.0.0.1") -> web.Application:
    """Return the application that shows the runs below ``runs_dir``. It reads files and writes none.

    Args:
        runs_dir: Folder with run folders at any depth, or one run's folder.
        host: Address that the server listens on: requests that name another host are refused.

    Raises:
        ConfigError: plotly is not installed.
    """
    app = web.Application(middlewares=[_guard(allowed_hosts(host))])
    app[RUNS] = Runs(runs_dir)
    app[api.WATCHED] = api.WatchedRuns(app[RUNS])
    static = _static_files()
    app.add_routes([web.get("/", _file_handler(static.pop("index.html")))])
    app.add_routes([web.get(f"/static/{name}", _file_handler(path)) for name, path in static.items()])
    app.add_routes([web.get("/static/plotly.js", _text_handler(plotly_js(), TYPES[".js"]))])
    app.add_routes([*api.routes(), *samples_api.routes()])
    return app


def _guard(names: frozenset[str]) -> Middleware:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse names of hosts that are not this one's, as a page that rebinds DNS would send; add the headers."""
        if not is_own(request.host, names):
            text = f"rlplug watch answers to {', '.join(sorted(names))} and to addresses, not to other names."
            raise web.HTTPForbidden(text=text, headers=HEADERS)
        try:
            response = await handler(request)
        except web.HTTPException as error:
            error.headers.update(HEADERS)
            raise
        response.headers.update(HEADERS)
        return response

    return guard


def _static_files() -> dict[str, Path]:
    files = [path for path in sorted(OWN.iterdir()) if path.suffix in TYPES]
    return {path.name: path for path in [*files, *(SHARED / name for name in SHARED_FILES)]}


def _file_handler(path: Path) -> Handler:
    return _text_handler(path.read_text(encoding="utf-8"), TYPES[path.suffix])


def _text_handler(text: str, content_type: str) -> Handler:
    etag = hashlib.sha256(text.encode()).hexdigest()[:16]

    async def answer(request: web.Request) -> web.Response:
        if any(tag.value == etag for tag in request.if_none_match or ()):
            response = web.Response(status=304)
        else:
            response = web.Response(text=text, content_type=content_type, charset="utf-8")
        response.etag = etag
        return response

    return answer
