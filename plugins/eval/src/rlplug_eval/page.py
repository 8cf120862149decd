"""Comparison page of an evaluation: one HTML file that needs no network, with the styles of a run's report."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jinja2
from rlplug_watch.report.summary import number

from rlplug.distributed.durable_files import replaced
from rlplug.observability.intervals import Estimate
from rlplug.observability.terminal import visible
from rlplug_eval.folder import EvalFolder, EvalRecord
from rlplug_eval.results import (
    METHODS,
    Difference,
    Group,
    Result,
    Results,
    difference_table,
    result_table,
    turned,
)

PAGE: Final = "report.html"
TEMPLATE: Final = "page.html.j2"
MOST_PROMPTS: Final = 12
"""Prompts of each pair of policies whose completions are shown."""
MAX_TEXT: Final = 4_000
"""Largest number of characters of a text."""


@dataclass(frozen=True)
class Bar:
    """An estimate on an axis of 100 units."""

    label: str
    text: str
    at: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Pair:
    """A prompt that two policies answered with different rewards."""

    uid: str
    prompt: str
    answer: str
    difference: float
    sides: tuple[tuple[str, Group], ...]


def write_page(folder: EvalFolder, results: Results) -> Path:
    """Write ``report.html`` into the folder of an evaluation and return its path."""
    record = folder.record
    loader = jinja2.ChoiceLoader(
        [jinja2.PackageLoader("rlplug_eval", "."), jinja2.PackageLoader("rlplug_watch.report", ".")]
    )
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "shown": _shown}
    page = environment.get_template(TEMPLATE).render(
        name=folder.path.name,
        record=record,
        sources=[_source(record, results, each["name"]) for each in record.data],
        methods=METHODS,
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        nonce=secrets.token_hex(16),
    )
    path = folder.path / PAGE
    with replaced(path) as partial:
        partial.write_text(page, encoding="utf-8", errors="replace")
    return path


def _shown(text: Any) -> str:
    """Return text from outside for the page: cut, and with control characters as escapes."""
    plain = str(text)
    return visible(plain[:MAX_TEXT]) + (" … cut here; completions.jsonl has the rest" if len(plain) > MAX_TEXT else "")


def _source(record: EvalRecord, results: Results, name: str) -> dict[str, Any]:
    mine = [result for result in results.results if result.data == name]
    differences = [difference for difference in results.differences if difference.data == name]
    return {
        "name": name,
        "table": turned(*result_table(mine)),
        "charts": [(f"pass@{k}", [_bar(result, k) for result in mine]) for k in record.options.ks],
        "baseline": differences[0].baseline if differences else "",
        "differences": turned(*difference_table(differences)) if differences else None,
        "errors": [(result.policy, result.first_error) for result in mine if result.first_error],
        "pairs": [(each, _pairs(results, each)) for each in differences],
    }


def _bar(result: Result, k: int) -> Bar:
    estimate = result.pass_at[k]
    if estimate is None:
        return Bar(result.policy, "-", 0.0, None, None)
    return Bar(result.policy, f"{100 * estimate.mean:.1f}%", *_percents(estimate))


def _percents(estimate: Estimate) -> tuple[float, float | None, float | None]:
    low, high = (None if value is None else round(100 * value, 2) for value in (estimate.low, estimate.high))
    return round(100 * estimate.mean, 2), low, high


def _pairs(results: Results, difference: Difference) -> list[Pair]:
    """Return prompts with the largest differences, half of them for and half against the policy."""
    mine = results.groups[difference.policy, difference.data]
    others = results.groups[difference.baseline, difference.data]
    found = []
    for uid, group in mine.items():
        if uid not in others:
            continue
        reward, other = group.mean_reward(), others[uid].mean_reward()
        if reward is not None and other is not None and reward != other:
            sides = ((difference.baseline, others[uid]), (difference.policy, group))
            row = group.rows[0]
            found.append(Pair(uid, row.prompt, str(row.answer), reward - other, sides))
    found.sort(key=lambda pair: pair.difference)
    worse = [pair for pair in found if pair.difference < 0][: MOST_PROMPTS // 2]
    better = [pair for pair in reversed(found) if pair.difference > 0][: MOST_PROMPTS // 2]
    return [*better, *worse]
