"""What grows with the steps of a run: CPU seconds and memory of its report, page, comparison, resume and logs.

``python benchmarks/long_run.py --steps 10000 --samples-mib 1000`` makes a run folder, and prints for each a process of
its own: CPU seconds, peak of its memory, and of that what imports took.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

CORE: Final = (
    *("reward/mean", "reward/std", "reward/error_share", "completion/length_mean", "completion/num_tokens"),
    *("time/step", "time/rollout", "time/update", "policy/entropy", "policy/grad_norm", "mismatch/mean"),
    *("throughput/tokens_per_s", "advantages/degenerate_groups", "validate/pass@1"),
)
NUM_METRICS: Final = 120
SAMPLES_PER_STEP: Final = 4


def make_run(folder: Path, num_steps: int, samples_mib: int) -> None:
    """Write a finished run with a validation every 50 steps."""
    folder.mkdir()
    draw = random.Random(0).random
    names = [*CORE, *(f"policy/x{index}" for index in range(NUM_METRICS - len(CORE)))]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            logged = {name: draw() for name in names if step % 50 == 0 or not name.startswith("validate/")}
            file.write(json.dumps({"step": step} | logged) + "\n")
    text = "The sum is 7. " * max(1, (samples_mib << 20) // (14 * num_steps * SAMPLES_PER_STEP))
    with (folder / "samples.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            for index in range(SAMPLES_PER_STEP):
                sample = {"step": step, "phase": "train", "prompt_uid": f"train.jsonl:{step}", "prompt": "3 + 4 = ?"}
                sample |= {"completion": text, "answer": "7", "reward": index / 4, "rewards": {"exact": index / 4}}
                file.write(json.dumps(sample | {"finish_reason": "stop", "num_tokens": 900}) + "\n")
    (folder / "run.json").write_text(json.dumps({"status": "finished", "started": "2026-01-01T00:00:00+00:00"}))
    (folder / "config.yaml").write_text("model: {}\n")


# ---- each in a process of its own: imports, then what is measured ---------------------------------------------------


def report(folder: Path) -> Callable[[], object]:
    from rlplug_watch.report.page import write_report

    return lambda: write_report(folder)


def spreadsheet(folder: Path) -> Callable[[], object]:
    from rlplug_watch.report.spreadsheet import write_csv

    return lambda: write_csv(folder, folder / "metrics.csv")


def compare(folder: Path) -> Callable[[], object]:
    from rlplug_watch.commands.compare import compare_command

    return lambda: compare_command([str(folder), str(folder)])


def first_list(folder: Path) -> Callable[[], object]:
    from rlplug_watch.page.run import WatchedRun

    return WatchedRun(folder, lambda name: folder / name if (folder / name).is_file() else None).summary


def page(folder: Path) -> Callable[[], object]:
    from rlplug_watch.page.run import WatchedRun
    from rlplug_watch.report.contents import build_contents

    run = WatchedRun(folder, lambda name: folder / name if (folder / name).is_file() else None)
    return lambda: build_contents(run.data())


def sample_index(folder: Path) -> Callable[[], object]:
    from rlplug_watch.page.sample_index import SampleIndex

    return lambda: SampleIndex(folder / "samples.jsonl").grow(3600.0)


def log_a_hundred_steps(folder: Path) -> Callable[[], object]:
    from rlplug.observability.metrics_log import MetricsLog

    log = MetricsLog(folder / "metrics.jsonl")
    values = {f"policy/x{index}": 0.5 for index in range(NUM_METRICS)}

    def run() -> None:
        for step in range(100):
            log.log_metrics(values, 10**6 + step)

    return run


def keep_rows(folder: Path) -> Callable[[], object]:
    """What a checkpoint every 20 steps keeps of files of rows that are nearly as long as it keeps them."""
    from rlplug.recording.provenance import KeptRows

    paths, rows, added = [folder / "metrics.jsonl", folder / "samples.jsonl"], KeptRows(), []
    for path, per_step in zip(paths, (1, SAMPLES_PER_STEP), strict=True):
        lines = path.read_bytes()[: 30 << 20].splitlines(keepends=True)[:-1]
        path.write_bytes(b"".join(lines))
        added.append(b"".join(lines[-20 * per_step :]))
    rows.of(paths)
    for path, new in zip(paths, added, strict=True):
        with path.open("ab") as file:
            file.write(new)
    return lambda: rows.of(paths)


def resume(folder: Path) -> Callable[[], object]:
    from rlplug.distributed.checkpoints.resumed_files import cut_back_lines, cut_back_metrics

    step = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"] - 10

    def run() -> None:
        cut_back_metrics(folder / "metrics.jsonl", step)
        cut_back_lines(folder / "samples.jsonl", step)

    return run


CHANGES: Final = (log_a_hundred_steps, keep_rows, resume)
"""What writes to the folder, and gets a copy of it."""
MEASURED: Final = (report, spreadsheet, compare, first_list, page, sample_index, *CHANGES)


def measure(name: str, folder: Path) -> None:
    (chosen,) = (each for each in MEASURED if each.__name__ == name)
    run = chosen(folder)
    imports_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    began, cpu_began = time.perf_counter(), time.process_time()
    run()
    cpu_s, wall_s = time.process_time() - cpu_began, time.perf_counter() - began
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    row = f"| {name.replace('_', ' ')} | {cpu_s:.2f} | {wall_s:.2f} | {peak_mib:,} | {imports_mib:,} |"
    print(row, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--samples-mib", type=int, default=1000)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure[0], Path(options.measure[1]))
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "001"
        make_run(folder, options.steps, options.samples_mib)
        print("| what | CPU s | wall s | peak MiB | of which imports |\n|---|---:|---:|---:|---:|", file=sys.stderr)
        for each in MEASURED:
            copy = Path(parent) / "copy"
            if each in CHANGES:
                shutil.copytree(folder, copy)
            command = [sys.executable, __file__, "--measure", each.__name__, str(copy if copy.exists() else folder)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            shutil.rmtree(copy, ignore_errors=True)


if __name__ == "__main__":
    main()
