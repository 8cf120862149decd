"""Measures FP8 weights beside bfloat16 ones: rollout, weight sync, mismatch, and the rounding alone.

``python benchmarks/fp8.py --engine vllm --shapes qwen3-1.7b qwen3-8b --out fp8`` runs ``rollout.py`` for each shape and
each dtype, one after the other in processes of their own, then rounds one matrix in several ways. Weights are random:
speeds and bytes are those of the shape, and the mismatch is that of random weights. It prints a table, and leaves
``rollout.py``'s lines of JSON in the folder ``--out``. What follows ``--`` is handed to ``rollout.py``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fp8_work import rounding_speeds
from rollout_work import ENGINES
from shapes import SHAPES

DEADLINE_S = 1800.0
ROWS = {
    "rollout, tokens/s": ("generate", "tokens_per_s", ",.0f"),
    "sync, s": ("sync", "median", ".3f"),
    "sync, GiB": ("sync", "gib", ".2f"),
    "buckets without an engine, s": ("sync: buckets without an engine", "median", ".3f"),
    "a look for NaN and infinity, s": ("sync: a look for NaN and infinity", "median", ".4f"),
    "mismatch mean, nats": ("mismatch", "mean", ".4f"),
    "mismatch p99, nats": ("mismatch", "p99", ".4f"),
    "mismatch max, nats": ("mismatch", "max", ".3f"),
}
"""Rows of the table: the measure of ``rollout.py``, its value, and how that is written."""


def measure(arguments: argparse.Namespace, shape: str, side: str) -> dict[str, Any]:
    """Run ``rollout.py`` for one side; return its lines by measure."""
    file: Path = arguments.out / f"{arguments.engine}-{shape}-{side}.jsonl"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += [str(Path(__file__).with_name("rollout.py")), "--engine", arguments.engine, "--shape", shape]
    command += ["--mismatch", "16", "--cycles", "0", "--out", str(file), *(["--fp8"] if side == "fp8" else [])]
    done = subprocess.run([*command, *arguments.rest], timeout=DEADLINE_S, check=False)
    if done.returncode:
        print(f"{shape} {side}: rollout.py ended with exit code {done.returncode}", file=sys.stderr)
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {line["measure"]: line for line in lines}


def table(runs: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Return a Markdown table with a column for each shape and side; what was not measured is left out."""
    head = ["", *(f"{shape}, {side}" for shape, side in runs)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, (measure_name, value, form) in ROWS.items():
        cells = [format(run[measure_name][value], form) if measure_name in run else "" for run in runs.values()]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def rounding(shape: tuple[int, int], device: torch.device, repeats: int) -> str:
    """Return a Markdown table of the ways to round one matrix."""
    rows = rounding_speeds(shape, device, repeats)
    lines = [f"rounding a matrix of {shape[0]} x {shape[1]}:", "", "| from | way | ms | GB/s |", "|---|---|---|---|"]
    lines += [
        f"| {r['dtype'].removeprefix('torch.')} | {r['way']} | {r['ms']:.3f} | {r['gb_per_s']:,.0f} |" for r in rows
    ]
    return "\n".join(lines)


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["qwen3-1.7b", "qwen3-8b"])
    parser.add_argument("--sides", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"])
    parser.add_argument("--matrix", type=int, nargs=2, default=[14336, 4096], help="rows and columns that are rounded")
    parser.add_argument("--repeats", type=int, default=10, help="of the rounding")
    parser.add_argument("--out", type=Path, default=Path("fp8"), help="folder")
    own, rest = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    arguments = parser.parse_args(own)
    arguments.rest = rest
    return arguments


def main() -> None:
    arguments = parse(sys.argv[1:])
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {where}\n\n{rounding(tuple(arguments.matrix), device, arguments.repeats)}\n")
    runs = {(shape, side): measure(arguments, shape, side) for shape in arguments.shapes for side in arguments.sides}
    if runs:
        print(f"\n{table(runs)}")
    if any("generate" not in run for run in runs.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
