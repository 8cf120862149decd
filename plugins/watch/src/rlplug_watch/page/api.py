"""JSON of the page: runs, one run, curves, and differences of configurations."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final

from aiohttp import web

from rlplug.errors import ConfigError
from rlplug_watch.page.curves import AXES, OVERVIEW, read_curve, read_rough_curve
from rlplug_watch.page.folders import Runs
from rlplug_watch.page.run import WatchedRun
from rlplug_watch.report.contents import build_contents
from rlplug_watch.report.figure import HUES, Figure, layout
from rlplug_watch.report.figures import phase_hues
from rlplug_watch.report.run_data import Metrics
from rlplug_watch.report.timeline import NEWEST, ChosenSteps

MAX_MEMORY_BYTES: Final = 512 << 20
"""Bytes of columns that are kept in memory: beyond them, those of the runs that were not asked for the longest go."""
MAX_BUCKETS: Final = 2000
MAX_RUNS_OF_A_REQUEST: Final = 200
SAMPLED_ROWS: Final = 40
TIMELINE_STEPS: Final = 20
"""Number of the newest steps whose phases are shown one by one."""


class WatchedRuns:
    """Runs that were asked for, with what was read of them.

    Args:
        runs: Folders of the runs.
    """

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._by_id: dict[str, WatchedRun] = {}
        self._lock = threading.Lock()

    def get(self, run_id: str) -> WatchedRun:
        """Return a run.

        Raises:
            HTTPNotFound: There is none with this id.
        """
        folder = self.runs.folder(run_id)
        if folder is None:
            self._by_id.pop(run_id, None)
            raise web.HTTPNotFound(text=f"there is no run {run_id!r} below {self.runs.root}")
        with self._lock:  # requests are answered in threads
            run = self._by_id.pop(run_id, None) or WatchedRun(folder, lambda name: self.runs.file(run_id, name))
            self._by_id[run_id] = run  # the last one asked for is the last
        return run

    def limit_memory(self) -> None:
        """Drop columns until the rest fits."""
        kept = 0
        for run in reversed(list(self._by_id.values())):
            kept += run.metrics.num_bytes
            if kept > MAX_MEMORY_BYTES:
                run.metrics.drop()


WATCHED: Final = web.AppKey("watched", WatchedRuns)


def routes() -> list[web.RouteDef]:
    """Return the routes below ``/api``."""
    return [
        web.get("/api/runs", _answer(_runs)),
        web.get("/api/runs/{run}", _answer(_run)),
        web.get("/api/rewards", _answer(_rewards)),
        web.get("/api/metrics", _answer(_metrics)),
        web.get("/api/curves", _answer(_curves)),
        web.get("/api/configs", _answer(_configs)),
    ]


def _answer(read: Callable[[WatchedRuns, web.Request], Any]) -> Callable[[web.Request], Any]:
    """Return a handler that reads files in a thread, so that a slow disk holds up no other answer."""

    async def handler(request: web.Request) -> web.Response:
        value = await asyncio.to_thread(read, request.app[WATCHED], request)
        text = await asyncio.to_thread(json.dumps, value, allow_nan=False, separators=(",", ":"))
        return web.Response(text=text, content_type="application/json")

    return handler


def _runs(watched: WatchedRuns, request: web.Request) -> Any:
    root = watched.runs.root
    rows = [{"id": run_id} | watched.get(run_id).summary() for run_id in list(watched.runs.all())]
    return {"root": str(root), "exists": root.is_dir(), "runs": rows}


def _run(watched: WatchedRuns, request: web.Request) -> Any:
    """Return what a run's page shows, or its version alone where the browser knows it."""
    run = watched.get(request.match_info["run"])
    if (version := run.version()) == request.query.get("known"):
        return {"version": version}
    try:
        steps = ChosenSteps.parse(chosen) if (chosen := request.query.get("steps")) else NEWEST
    except ConfigError as error:
        raise web.HTTPBadRequest(text=str(error)) from None
    data = run.data(steps)
    contents = build_contents(data)
    watched.limit_memory()
    return asdict(contents) | {
        "version": version,
        "name": data.name,
        "folder": str(run.folder),
        "advice": [{"text": one.text, "key": one.setting, "page": one.url} for one in contents.advice],
        "sections": [[section, [_figure(figure) for figure in figures]] for section, figures in contents.sections],
        "timeline": _timeline(data.metrics),
        "has_timelines": bool(data.timelines) or "steps" in request.query,
        "config": data.config,
        "profile": data.profile,
        "notes": data.notes,
    }


def _figure(figure: Figure) -> dict[str, Any]:
    own = {name: getattr(figure, name) for name in ("title", "unit", "note", "wide", "spec")}
    return own | {"legend": [asdict(entry) for entry in figure.legend]}


def _timeline(metrics: Metrics) -> dict[str, Any]:
    """Return the seconds of each phase of the newest steps, phases in the order in which they run."""
    hues = phase_hues(metrics, "time/")
    cells = {phase: metrics.columns[f"time/{phase}"] for phase in hues}
    timed = [
        index for index in range(len(metrics.steps)) if any(column[index] is not None for column in cells.values())
    ]
    rows = [
        {"step": metrics.steps[index], "seconds": [column[index] for column in cells.values()]}
        for index in timed[-TIMELINE_STEPS:]
    ]
    return {"phases": [{"name": name, "hue": hue} for name, hue in hues.items()], "steps": rows}


def _rewards(watched: WatchedRuns, request: web.Request) -> Any:
    """Return steps and mean rewards of some rows of each run, for the small curves of the list."""
    sampled = {run_id: watched.get(run_id).metrics.sampled("reward/mean", SAMPLED_ROWS) for run_id in _asked(request)}
    return {"rewards": {run_id: [column.tolist() for column in pair] for run_id, pair in sampled.items()}}


def _metrics(watched: WatchedRuns, request: web.Request) -> Any:
    """Return the metrics of some runs, each once, in the order of the files, and the layout of a chart of them."""
    names = [name for run_id in _asked(request) for name in watched.get(run_id).metrics.names()]
    metrics = [name for name in dict.fromkeys(names) if name != "step"]
    first = [name for name in OVERVIEW if name in metrics]
    return {"metrics": metrics, "overview": first, "layout": layout({}, {}), "hues": HUES}


def _curves(watched: WatchedRuns, request: web.Request) -> Any:
    metric, axis = request.query.get("metric", ""), request.query.get("axis", "step")
    if axis not in AXES:
        raise web.HTTPBadRequest(text=f"axis is {axis!r}: use one of {', '.join(AXES)}")
    try:
        buckets = min(MAX_BUCKETS, max(2, int(request.query.get("buckets", "400"))))
    except ValueError:
        raise web.HTTPBadRequest(text="buckets must be a number") from None
    curves, read = {}, read_rough_curve if "rough" in request.query else read_curve
    for run_id in _asked(request):
        run = watched.get(run_id)
        samples = run.samples_per_step() if axis == "samples" else None
        curve = read(run.metrics, metric, axis, samples, buckets)
        curves[run_id] = None if curve is None else asdict(curve)
    watched.limit_memory()
    return {"curves": curves}


def _configs(watched: WatchedRuns, request: web.Request) -> Any:
    """Return the keys whose values differ between some runs, with the value of each run, ``None`` where it has none."""
    ids = _asked(request)
    configs = [watched.get(run_id).config() for run_id in ids]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [{"key": key, "values": [config.get(key) for config in configs]} for key in keys]
    return {
        "runs": ids,
        "rows": [row for row in rows if len(set(row["values"])) > 1],
        "num_equal": sum(len(set(row["values"])) == 1 for row in rows),
        "absent": [run_id for run_id, config in zip(ids, configs, strict=True) if not config],
    }


def _asked(request: web.Request) -> Sequence[str]:
    ids = list(dict.fromkeys(request.query.getall("run", [])))
    if not 0 < len(ids) <= MAX_RUNS_OF_A_REQUEST:
        raise web.HTTPBadRequest(text=f"give run=ID 1 to {MAX_RUNS_OF_A_REQUEST} times")
    return ids
