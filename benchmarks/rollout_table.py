"""Turns the rollout benchmark's lines of JSON into Markdown: a table for each workload, a column for each side."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

WORKLOAD: Final = (
    "shape",
    "sequences",
    "group",
    "prompt",
    "new",
    "longest",
    "tensor_parallel",
    "eager",
    "processes",
    "gpu",
)
"""Arguments that two runs must share to be in one table."""

NAMES: Final = {"vllm": "vLLM", "sglang": "SGLang", "hf": "transformers"}
CYCLE_ROWS: Final = {
    "sync": "sync after sleep, s",
    "sleep": "sleep, s",
    "wake_weights": "wake weights, s",
    "wake_kv_cache": "wake KV cache, s",
    "freed_gib": "freed by sleep, GiB",
}

Cell = tuple[str, str]
"""Engine and phase."""


def print_tables(files: Sequence[Path]) -> None:
    """Print the tables of all runs in ``files``; where a workload was run twice, the later one counts."""
    for workload, cells in read_runs(files).items():
        print(f"{title(workload)}\n\n{markdown(cells)}\n")


def read_runs(files: Sequence[Path]) -> dict[tuple[Any, ...], dict[Cell, dict[str, list[dict[str, Any]]]]]:
    """Return, for each workload and each side of it, the lines of each measure."""
    runs: dict[tuple[Any, ...], dict[Cell, dict[str, list[dict[str, Any]]]]] = {}
    for file in files:
        cells: dict[Cell, dict[str, list[dict[str, Any]]]] | None = None
        for line in _lines(file):
            if line["measure"] == "arguments":
                cells = runs.setdefault(tuple(line.get(name) for name in WORKLOAD), {})
                for phase in line["phases"]:
                    cells[line["engine"], phase] = {"arguments": [line]}
            elif cells is None:
                raise SystemExit(f"{file}: a measure comes before any line of arguments: give the whole file")
            else:
                cells[line["engine"], line["phase"]].setdefault(line["measure"], []).append(line)
    return runs


def _lines(file: Path) -> Iterable[dict[str, Any]]:
    for number, text in enumerate(file.read_text().splitlines(), start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            line = None
        if isinstance(line, dict) and {"engine", "phase", "measure"} <= line.keys():
            yield line
        else:
            print(f"{file}:{number}: left out, it is no measure: {text[:60]}", file=sys.stderr)


def title(workload: tuple[Any, ...]) -> str:
    """Return what was run, in words."""
    about = dict(zip(WORKLOAD, workload, strict=True))
    tail = f" on average, at most {about['longest']}" if about["longest"] else ""
    words = [
        f"{about['shape']}: {about['sequences']} sequences, {about['group']} a prompt of {about['prompt']} tokens",
        f"{about['new']} new tokens{tail}",
        f"{about['processes']} x {about['gpu'] or 'CPU'}",
    ]
    if about["tensor_parallel"] > 1:
        words.append(f"tensor parallelism {about['tensor_parallel']}")
    return ", ".join(words + ["without CUDA graphs"] * bool(about["eager"]))


def markdown(cells: dict[Cell, dict[str, list[dict[str, Any]]]]) -> str:
    """Return one table; empty where something was not measured."""
    order = [(engine, phase) for engine in NAMES for phase in ("bare", "plugin") if (engine, phase) in cells]
    columns = {cell: column(cells[cell]) for cell in order}
    for engine, phase in order:
        other, mine = cells.get((engine, "bare"), {}).get("generate"), cells[engine, phase].get("generate")
        if phase == "plugin" and other and mine:
            ratio = mine[-1]["tokens_per_s"] / other[-1]["tokens_per_s"]
            columns[engine, phase]["of the bare engine's"] = f"{ratio:.1%}"
    rows = [name for name in ROWS if any(name in values for values in columns.values())]
    rows += sorted({name for values in columns.values() for name in values} - set(ROWS))
    lines = [f"| | {' | '.join(f'{NAMES[engine]}, {phase}' for engine, phase in order)} |", f"|-|{'-|' * len(order)}"]
    lines += [f"| {name} | {' | '.join(columns[cell].get(name, '') for cell in order)} |" for name in rows]
    return "\n".join(lines)


ROWS: Final = (
    "tokens/s, median",
    "of the bare engine's",
    "tokens/s, best",
    "tokens/s with seeds, median",
    "tokens/s after waking",
    "start, s",
    "sync, s",
    "sync, GB/s",
    "sync, buckets",
    *CYCLE_ROWS.values(),
    "sync: floor, the bytes once",
    "sync: buckets without an engine",
)


def column(measures: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Return the rows of one side."""
    rows: dict[str, str] = {}
    for name, lines in measures.items():
        line = lines[-1]
        if name == "start":
            rows["start, s"] = f"{line['seconds']:.1f}"
        elif name == "generate":
            rows["tokens/s, median"] = f"**{line['tokens_per_s']:,.0f}**"
            rows["tokens/s, best"] = f"{line['best']:,.0f}"
        elif name == "generate, seeded":
            rows["tokens/s with seeds, median"] = f"{line['tokens_per_s']:,.0f}"
        elif name == "sync":
            rows["sync, s"] = f"{line['median']:.3f}"
            rows["sync, GB/s"] = f"{line['gb_per_s']:.1f}"
            rows["sync, buckets"] = f"{line['buckets']} ({line['gib']:.2f} GiB)"
        elif name == "cycle":
            rows["tokens/s after waking"] = f"{statistics.median(cycle['tokens_per_s'] for cycle in lines):,.0f}"
            for key, row in CYCLE_ROWS.items():
                rows[row] = f"{statistics.median(cycle[key] for cycle in lines):.{1 if key == 'freed_gib' else 3}f}"
        elif name.startswith("sync: "):
            rows[name] = f"{line['median']:.3f}"
        elif name == "failed":
            rows["failed"] = " ".join(line["reason"].split()).replace("|", "\\|")[:300]
    return rows
