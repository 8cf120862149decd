r"""Runs a short fit on GPUs and prints how busy they were, by the run's own metrics and by nvidia-smi beside it.

    python benchmarks/gpu_busy.py --out OUT [--devices 2] [-- -c my_run.yaml --model.num_steps 10]

What follows ``--`` are arguments of ``rlplug fit``; by default the quickstart in bfloat16, whose model is so small that
its MFU says nothing. Printed are the median and last values of ``gpu/...``, ``throughput/mfu`` and ``time/step`` over
the steps without the first, means of nvidia-smi over the same GPUs, and the median step with ``--block gpu_use``, which
is without the sampler. It exits with 1 when a metric is absent. Needs rlplug-watch[gpu], rlplug-algos, and a driver.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median

ROOT = Path(__file__).parents[1]
NAMES = ("gpu/busy_share", "gpu/busy_share_min", "gpu/memory_gib", "gpu/power_w", "throughput/mfu", "time/step")
QUICKSTART = [f"-c={ROOT}/configs/quickstart.yaml", "--model.num_steps=20", "--model.policy.dtype=bfloat16"]
MONITOR = "nvidia-smi --query-gpu=index,utilization.gpu,memory.used,power.draw --format=csv,noheader,nounits -lms 250"


def fit(folder: Path, devices: int, arguments: list[str]) -> list[dict[str, float]]:
    """Run a fit, and return the metrics of its steps without the first."""
    command = [sys.executable, "-m", "rlplug", "fit", *arguments]
    command += ["--trainer.accelerator", "gpu", "--trainer.devices", str(devices), "--run.dir", str(folder)]
    subprocess.run(command, check=True)
    (file,) = folder.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row for row in rows if row.get("step", 0) > 1 and "time/step" in row]


def column(rows: list[dict[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("arguments", nargs="*", help="of rlplug fit, after --")
    options = parser.parse_args()
    if shutil.which("nvidia-smi") is None:
        parser.error("there is no nvidia-smi here: this needs a GPU of NVIDIA and its driver")
    arguments = options.arguments or QUICKSTART
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "nvidia-smi.csv"
    with log.open("w") as file, subprocess.Popen(MONITOR.split(), stdout=file) as monitor:
        rows = fit(options.out / "with", options.devices, arguments)
        monitor.terminate()
    without = fit(options.out / "without", options.devices, [*arguments, "--block", "gpu_use"])

    for name in NAMES:
        values = column(rows, name)
        shown = f"median {median(values):.4g}, last {values[-1]:.4g}" if values else "ABSENT"
        print(f"{name:24} {shown} ({len(values)} of {len(rows)} steps)")
    print(f"{'time/step, no sampler':24} median {median(column(without, 'time/step')):.4g}")
    seen = [[float(cell) for cell in line.split(",")] for line in log.read_text().splitlines()]
    used = [row for row in seen if row[0] < options.devices]
    busy, memory, power = (fmean(row[i] for row in used) for i in (1, 2, 3))
    print(f"nvidia-smi, start included: busy {busy:.0f}%, memory {memory / 1024:.1f} GiB, power {power:.0f} W (means)")
    return int(any(not column(rows, name) for name in NAMES))


if __name__ == "__main__":
    sys.exit(main())
