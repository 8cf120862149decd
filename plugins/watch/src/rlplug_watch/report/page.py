"""Writer of a run's report: a page, whose script lies beside the run folders, or one file that holds it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import jinja2
from markupsafe import Markup

from rlplug.distributed.durable_files import write_file
from rlplug.errors import ConfigError
from rlplug_watch.config_values import masked_config
from rlplug_watch.report.contents import build_contents
from rlplug_watch.report.run_data import RunData, read_run
from rlplug_watch.report.summary import number
from rlplug_watch.report.timeline import FILE as TIMELINE_FILE
from rlplug_watch.report.timeline import NEWEST, ChosenSteps

REPORT_FILE: Final = "report.html"
TEMPLATE: Final = "report.html.j2"

LONG_TEXT: Final = 700
"""Largest number of characters of a text that is not folded."""
MAX_TEXT: Final = 20_000
"""Largest number of characters of a text, which is cut so that the report opens on a phone."""
MAX_FAILURES: Final = 10


def write_report(run_dir: Path, steps: ChosenSteps = NEWEST, is_single_file: bool = False) -> Path:
    """Write ``report.html`` into the run folder ``run_dir`` and return its path; an existing report is replaced.

    The page has its styles and data. Plotly's script, 4.8 MB, is written once for all runs of a folder, to the folder
    above the run's. The browser is forbidden to load anything else.

    Args:
        run_dir: The run folder.
        steps: Steps that are shown one by one, where the run recorded what its engine did.
        is_single_file: The page holds the script too, so that it can be mailed.

    Raises:
        ConfigError: ``run_dir`` is not a run folder, has none of the chosen steps, or plotly is not installed.
    """
    run_dir = Path(run_dir)
    run = read_run(run_dir, steps)
    if steps != NEWEST and not run.timelines:
        raise ConfigError(
            f"{run_dir} has no timeline of {steps}: runs with model.partial_rollout record one, in {TIMELINE_FILE}."
        )
    script, script_file = plotly_js(), ""
    if not is_single_file:
        script_file = f"plotly-{plotly_version()}.min.js"
        shared = run_dir.resolve().parent / script_file
        if not shared.is_file() or shared.stat().st_size != len(script.encode()):
            write_file(shared, script)
    page = _render(run, script, script_file)
    path = run_dir / REPORT_FILE
    # A completion that was cut inside a character may hold half of a surrogate pair, which UTF-8 cannot encode.
    write_file(path, page.encode(errors="replace").decode())
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


def plotly_version() -> str:
    """Return the version of plotly's script."""
    from plotly.offline import get_plotlyjs_version

    version: str = get_plotlyjs_version()
    return version


def _render(run: RunData, script: str, script_file: str) -> str:
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
        config=masked_config(run.config),
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        best=run.samples.best,
        worst=run.samples.worst,
        late_steps=_step_range(run.samples.late_steps),
        failures=run.samples.failures[:MAX_FAILURES],
        num_more_failures=max(0, len(run.samples.failures) - MAX_FAILURES),
        long_text=LONG_TEXT,
        max_text=MAX_TEXT,
        script=Markup(script),
        script_file=script_file,
        # Only scripts with this nonce run: markup in a completion stays inert even if an escape were forgotten.
        nonce=secrets.token_hex(16),
    )


def _step_range(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    first, last = steps
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
