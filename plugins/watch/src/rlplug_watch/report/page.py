"""Writer of a run's report as one HTML file."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Final

import jinja2
from markupsafe import Markup

from rlplug.errors import ConfigError
from rlplug_watch.report.contents import build_contents
from rlplug_watch.report.run_data import RunData, read_run
from rlplug_watch.report.summary import best_and_worst, number
from rlplug_watch.report.timeline import FILE as TIMELINE_FILE
from rlplug_watch.report.timeline import NEWEST, ChosenSteps
from rlplug_watch.secrets import mask_yaml

REPORT_FILE: Final = "report.html"
TEMPLATE: Final = "report.html.j2"

LONG_TEXT: Final = 700
"""Largest number of characters of a text that is not folded."""
MAX_TEXT: Final = 20_000
"""Largest number of characters of a text, which is cut so that the report opens on a phone."""
MAX_FAILURES: Final = 10


def write_report(run_dir: Path, steps: ChosenSteps = NEWEST) -> Path:
    """Write ``report.html`` into the run folder ``run_dir`` and return its path; an existing report is replaced.

    The file holds its script, styles and data. It loads nothing, and forbids the browser to, so it can be mailed.

    Args:
        run_dir: The run folder.
        steps: Steps that are shown one by one, where the run recorded what its engine did.

    Raises:
        ConfigError: ``run_dir`` is not a run folder, has none of the chosen steps, or plotly is not installed.
    """
    run_dir = Path(run_dir)
    run = read_run(run_dir, steps)
    if steps != NEWEST and not run.timelines:
        raise ConfigError(
            f"{run_dir} has no timeline of {steps}: runs with model.partial_rollout record one, in {TIMELINE_FILE}."
        )
    page = _render(run, plotly_js())
    path = run_dir / REPORT_FILE
    unfinished = path.with_suffix(".html.tmp")
    # A completion that was cut inside a character may hold half of a surrogate pair, which UTF-8 cannot encode.
    unfinished.write_bytes(page.encode("utf-8", errors="replace"))
    os.replace(unfinished, path)
    return path


def plotly_js() -> str:
    """Return plotly's script.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Figures are drawn with plotly, which is not installed ({error}): pip install rlplug-watch."
        ) from error
    script: str = get_plotlyjs()
    return script


def _render(run: RunData, script: str) -> str:
    best, worst = best_and_worst(run.samples.late)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rlplug_watch.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters["number"] = number
    return environment.get_template(TEMPLATE).render(
        run=run,
        contents=build_contents(run),
        config=mask_yaml(run.config),
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        best=best,
        worst=worst,
        late_steps=_step_range(sorted({sample.step for sample in run.samples.late})),
        failures=run.samples.failures[:MAX_FAILURES],
        num_more_failures=max(0, len(run.samples.failures) - MAX_FAILURES),
        long_text=LONG_TEXT,
        max_text=MAX_TEXT,
        plotly_js=Markup(script),
        # Only scripts with this nonce run: markup in a completion stays inert even if an escape were forgotten.
        nonce=secrets.token_hex(16),
    )


def _step_range(steps: list[int]) -> str:
    if not steps:
        return ""
    return f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
