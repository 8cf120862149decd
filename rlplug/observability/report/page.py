"""Writer of a run's report as one HTML file."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup

from rlplug.errors import ConfigError
from rlplug.observability.advice import advise
from rlplug.observability.loggers.secrets import mask_yaml
from rlplug.observability.report.figures import build_figures, by_section
from rlplug.observability.report.run_data import RunData, read_run
from rlplug.observability.report.summary import best_and_worst, build_tiles, hook_costs, metric_rows, number, parse_time

REPORT_FILE: Final = "report.html"
TEMPLATE: Final = "report.html.j2"

HEADLINE_PACKAGES: Final = ("rlplug", "torch")
KEY_PACKAGES: Final = (
    *HEADLINE_PACKAGES,
    "python",
    "lightning",
    "transformers",
    "vllm",
    "sglang",
    "tensorrt-llm",
    "flash-attn",
    "liger-kernel",
    "triton",
    "safetensors",
)

LONG_TEXT: Final = 700
"""Largest number of characters of a text that is not folded."""
MAX_TEXT: Final = 20_000
"""Largest number of characters of a text, which is cut so that the report opens on a phone."""
MAX_FAILURES: Final = 10


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into the run folder ``run_dir`` and return its path; an existing report is replaced.

    The file holds its script, styles and data. It loads nothing, and forbids the browser to, so it can be mailed.

    Raises:
        ConfigError: ``run_dir`` is not a run folder, or plotly is not installed.
    """
    run_dir = Path(run_dir)
    run = read_run(run_dir)
    page = _render(run, _plotly_js())
    path = run_dir / REPORT_FILE
    unfinished = path.with_suffix(".html.tmp")
    # A completion that was cut inside a character may hold half of a surrogate pair, which UTF-8 cannot encode.
    unfinished.write_bytes(page.encode("utf-8", errors="replace"))
    os.replace(unfinished, path)
    return path


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"A report draws its figures with plotly, which is not installed ({error}): pip install 'rlplug[report]'."
        ) from error
    script: str = get_plotlyjs()
    return script


def _render(run: RunData, plotly_js: str) -> str:
    figures, absent = build_figures(run.metrics)
    best, worst = best_and_worst(run.samples.late)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rlplug.observability.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters["number"] = number
    return environment.get_template(TEMPLATE).render(
        run=run,
        header=_header(run.info),
        advice=advise(run.metrics, run.info),
        config=mask_yaml(run.config),
        tiles=build_tiles(run.metrics, run.info),
        sections=by_section(figures),
        absent=absent if run.metrics.steps else [],
        metric_rows=metric_rows(run.metrics),
        best=best,
        worst=worst,
        late_steps=_step_range(sorted({sample.step for sample in run.samples.late})),
        failures=run.samples.failures[:MAX_FAILURES],
        num_more_failures=max(0, len(run.samples.failures) - MAX_FAILURES),
        batch_plan=_rows(run.info.get("batch_plan"), 3),
        versions=_versions(run.info),
        effects=[str(effect) for effect in _list(run.info.get("effects"))],
        hook_costs=hook_costs(run.info.get("hook_costs"), sum(run.metrics.series("time/step").values)),
        plugins=[plugin for plugin in _list(run.info.get("plugins")) if isinstance(plugin, dict)],
        long_text=LONG_TEXT,
        max_text=MAX_TEXT,
        plotly_js=Markup(plotly_js),
        # Only scripts with this nonce run: markup in a completion stays inert even if an escape were forgotten.
        nonce=secrets.token_hex(16),
    )


def _header(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the page's header: the run's status, its message, and one line of details."""
    started, finished = parse_time(info.get("started")), parse_time(info.get("finished"))
    world_size, device = info.get("world_size"), str(info.get("device") or "").removesuffix(":0")
    details = [
        f"{world_size} \N{MULTIPLICATION SIGN} {device}" if device and world_size else device,
        f"started {started:%Y-%m-%d %H:%M}" if started else "",
        f"ended {finished:%Y-%m-%d %H:%M}" if finished else "",
        *(f"{name} {version}" for name, version in _versions(info) if name in HEADLINE_PACKAGES),
    ]
    return {
        "status": str(info.get("status") or "unknown"),
        "message": str(info.get("message") or ""),
        "details": [detail for detail in details if detail],
        "written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def _versions(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return package names and versions, the most important ones first."""
    versions = info.get("versions")
    named = {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}
    first = [name for name in KEY_PACKAGES if name in named]
    own = sorted(name for name in named if name.startswith("rlplug-"))
    rest = sorted({*named} - {*first, *own}, key=str.lower)
    return [(name, named[name]) for name in (*first, *own, *rest)]


def _step_range(steps: list[int]) -> str:
    if not steps:
        return ""
    return f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _rows(value: Any, width: int) -> list[list[str]]:
    """Return ``value`` as rows with ``width`` texts each."""
    rows = [[str(cell) for cell in _list(row)] for row in _list(value)]
    return [[*row, *[""] * width][:width] for row in rows if row]
