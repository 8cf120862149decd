"""Ten runs of 10,000 steps, made by a script, that ended in ten ways: do list and page show what was logged?

``python benchmarks/ten_long_runs.py [--steps 10000]`` prints a row for each: figures that differ from what the script
logged, and CPU seconds and peak memory of a process that writes its report.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

NAMES: Final = (
    *("reward/mean", "policy/entropy", "policy/grad_norm", "completion/length_mean", "completion/num_tokens"),
    *("time/step", "time/rollout", "time/update", "throughput/tokens_per_s", "reward/error_share"),
    *(f"policy/x{index}" for index in range(10)),
)
VALIDATED: Final = "validate/pass@1"
EVERY: Final = 50
Row = dict[str, Any]


def rows(num_steps: int, seed: int) -> Iterator[Row]:
    draw = random.Random(seed).random
    for step in range(1, num_steps + 1):
        yield {"step": step} | {name: draw() for name in NAMES} | ({VALIDATED: draw()} if step % EVERY == 0 else {})


def late_scores(found: list[Row]) -> list[Row]:
    """Return the rows with each validation on a line of its own, three steps later, as of one beside the training."""
    scores = {row["step"]: {"step": row["step"], VALIDATED: row.pop(VALIDATED)} for row in found if VALIDATED in row}
    lines = [line for row in found for line in (row, scores.pop(row["step"] - 3, None)) if line]
    return [*lines, *scores.values()]


def resumed(found: list[Row]) -> list[Row]:
    """Return the rows of a run that was killed before it had removed its rows of an abandoned end."""
    middle = len(found) // 2
    return [*found[:middle], *(row | {"reward/mean": 2.0} for row in found[middle : middle + 200]), *found[middle:]]


def not_finite(found: list[Row]) -> list[Row]:
    return [row | ({"policy/entropy": "NaN"} if row["step"] % 3 == 0 else {}) for row in found]


def begins_late(found: list[Row]) -> list[Row]:
    return [row | ({"curriculum/solved": row["step"] / 1e5} if row["step"] > len(found) * 0.9 else {}) for row in found]


def many_metrics(found: list[Row]) -> list[Row]:
    return [row | {f"source/{index}": 0.5 for index in range(100)} for row in found]


KINDS: Final[dict[str, Callable[[list[Row]], list[Row]]]] = {
    "finished": lambda found: found,
    "killed in a line": lambda found: found,
    "damaged in the middle": lambda found: found,
    "rows of an abandoned end": resumed,
    "NaN in a third of the steps": not_finite,
    "a metric from step 9,000 on": begins_late,
    "scores beside the training": late_scores,
    "120 metrics": many_metrics,
    "without samples": lambda found: found,
    "without run.json": lambda found: found,
}


def make_run(folder: Path, kind: str, num_steps: int, seed: int) -> None:
    folder.mkdir(parents=True)
    lines = [json.dumps(row) + "\n" for row in KINDS[kind](list(rows(num_steps, seed)))]
    if kind == "damaged in the middle":
        lines[len(lines) // 2 : len(lines) // 2] = ["\0" * 300 + "\n", '{"step": 7, "reward/m\n']
    if kind == "killed in a line":
        lines.append('{"step": 99999999, "reward/mean": 7.0')
    (folder / "metrics.jsonl").write_text("".join(lines))
    if kind != "without samples":
        sample = {
            "phase": "train",
            "prompt_uid": "p",
            "prompt": "3 + 4",
            "completion": "7",
            "answer": "7",
            "reward": 1.0,
        }
        sample |= {"rewards": {"exact": 1.0}, "finish_reason": "stop", "num_tokens": 9}
        text = "".join(json.dumps({"step": step} | sample) + "\n" for step in range(1, num_steps + 1))
        (folder / "samples.jsonl").write_text(text)
    if kind != "without run.json":
        record = {"status": "finished", "started": "2026-01-01T00:00:00+00:00", "finished": "2026-01-02T00:00:00+00:00"}
        (folder / "run.json").write_text(json.dumps(record))
    (folder / "config.yaml").write_text("model: {}\n")


def differences(folder: Path, kind: str, num_steps: int, seed: int) -> list[str]:
    """Return what the list and the page show otherwise than it was drawn."""
    from rlplug_watch.page.run import LATEST, WatchedRun

    run = WatchedRun(folder, lambda name: folder / name if (folder / name).is_file() else None)
    metrics, latest = run.data().metrics, run.summary()["latest"]
    drawn = list(rows(num_steps, seed))
    wanted = {name: [(row["step"], row[name]) for row in drawn if name in row] for name in (*NAMES, VALIDATED)}
    if kind == "NaN in a third of the steps":
        wanted["policy/entropy"] = [each for each in wanted["policy/entropy"] if each[0] % 3]
    found = []
    for name, values in wanted.items():
        series = metrics.series(name)
        if list(zip(series.steps, series.values, strict=True)) != values:
            found.append(f"page: {name}")
    found += [
        f"list: {label}"
        for label, column in LATEST.items()
        if column in wanted and latest[label] != wanted[column][-1][1]
    ]
    return found if metrics.num_trained == num_steps else [*found, f"page: {metrics.num_trained} steps"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--look-at", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.look_at:  # in a process of its own: a child's peak is never below its parent's
        folder, kind = Path(options.look_at[0]), options.look_at[1]
        seed = [*KINDS].index(kind)
        make_run(folder, kind, options.steps, seed)
        print(", ".join(differences(folder, kind, options.steps, seed)) or "none")
        return
    print("| run | figures that differ | report, CPU s | peak MiB |\n|---|---|---:|---:|")
    with tempfile.TemporaryDirectory() as parent:
        for number, kind in enumerate(KINDS):
            run = str(Path(parent) / f"{number:03}")
            look = [sys.executable, __file__, "--steps", str(options.steps), "--look-at", run, kind]
            found = subprocess.run(look, check=True, capture_output=True, text=True).stdout.strip()
            report = [sys.executable, str(Path(__file__).with_name("long_run.py")), "--measure", "report", run]
            row = subprocess.run(report, check=True, capture_output=True, text=True).stderr.splitlines()[-1]
            _, _, cpu_s, _, peak, *_ = row.split("|")
            print(f"| {kind} | {found} |{cpu_s}|{peak}|", flush=True)


if __name__ == "__main__":
    main()
