"""What came of the claims that needed GPUs: read from logs, kept as JSON, and written as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpu_debt import Debt

PYTEST_END: Final = re.compile(r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error).* in [\d.]+s.*?)(?: =+)?$")
LEFT_OUT: Final = ("keywords", "stats", "advice", "versions", "engine_args", "options", "buckets")
"""Keys of printed lines that are no figures."""
OF_ARGUMENTS: Final = "arguments"
"""The measure with which ``rollout.py`` repeats its command line."""
KEPT_LINES: Final = 60


@dataclass
class Outcome:
    """What came of one claim."""

    name: str
    result: str
    """``ran`` (its commands ended with 0), ``failed``, ``timed out`` or ``not run``."""
    seconds: float = 0.0
    reason: str = ""
    """Why it was not run."""
    figures: list[dict[str, Any]] = field(default_factory=list)
    """The lines of JSON that it printed, without what only repeats the command."""
    tables: list[str] = field(default_factory=list)
    """The lines of Markdown tables that it printed."""
    tail: list[str] = field(default_factory=list)
    """The last lines of its log, where it did not end well."""

    @classmethod
    def of_log(cls, name: str, result: str, seconds: float, log: str) -> Outcome:
        """Read figures, and for what did not end well its end, from what a claim printed."""
        lines, figures = log.splitlines(), []
        for line in lines:
            if line.startswith('{"'):
                try:
                    figure = json.loads(line)
                except json.JSONDecodeError:
                    continue  # cut off by the process's end
                if figure.get("measure") != OF_ARGUMENTS:
                    figures.append({key: value for key, value in figure.items() if key not in LEFT_OUT})
            elif found := PYTEST_END.match(line):
                figures.append({"pytest": found.group(1)})
        tail = [] if result == "ran" else lines[-KEPT_LINES:]
        tables = [line for line in lines if line.startswith("|")]
        return cls(name, result, round(seconds, 1), "", figures, tables, tail)


def read_outcomes(folders: Sequence[Path]) -> tuple[dict[str, Any], dict[str, Outcome]]:
    """Return where claims ran, and what came of each; of one that ran in several folders the last run counts."""
    about: dict[str, Any] = {}
    outcomes: dict[str, Outcome] = {}
    for folder in folders:
        read = json.loads((folder / "debts.json").read_text())
        about |= read["about"]
        for name, values in read["outcomes"].items():
            if values["result"] != "not run" or name not in outcomes:
                outcomes[name] = Outcome(**values)
    return about, outcomes


def markdown(debts: Mapping[str, Debt], about: dict[str, Any], outcomes: Mapping[str, Outcome]) -> str:
    """Return a table of all claims, and below it the figures of each that ran."""
    where = f"{len(about['gpus'])} x {about['gpus'][0]}" if about["gpus"] else "CPU"
    head = f"{where}, torch {about['torch']}, {about['date']}, commit {about['commit'] or 'unknown'}"
    lines = [head, "", "| claim | name | result | s |", "|-|-|-|-|"]
    for name, debt in debts.items():
        outcome = outcomes.get(name, Outcome(name, "not run", reason="not asked for"))
        reason = f": {outcome.reason}" if outcome.reason else ""
        took = f"{outcome.seconds:.0f}" if outcome.seconds else ""
        lines.append(f"| {debt.claim} | `{name}` | {outcome.result}{reason} | {took} |")
    for name, outcome in outcomes.items():
        if outcome.result == "not run":
            continue
        lines += ["", f"## `{name}`: {outcome.result}", "", *_figures(outcome.figures), *outcome.tables]
        if outcome.tail:
            lines += ["", "```text", *(line[:300] for line in outcome.tail[-12:]), "```"]
    return "\n".join(lines) + "\n"


def _figures(figures: Sequence[dict[str, Any]]) -> list[str]:
    """Return tables, one for consecutive figures with the same keys."""
    lines: list[str] = []
    keys: list[str] = []
    for figure in figures:
        if [*figure] != keys:
            keys = [*figure]
            lines += ["", f"| {' | '.join(keys)} |", "|" + "-|" * len(keys)]
        lines.append(f"| {' | '.join(_cell(value) for value in figure.values())} |")
    return lines


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")[:200]
