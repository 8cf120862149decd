"""Trains beside a vLLM engine that sleeps, and compares ``memory/<phase>`` with what the driver says was in use.

    python benchmarks/sleeping_peaks.py --out FOLDER [-- further arguments of rlplug fit]

PyTorch counts the memory of a sleeping engine as allocated, so peaks that are not cut where it sleeps and wakes add
the trainer's weights to an engine that made room for them. A thread reads the driver's free memory every 2 ms. It exits
with 1 if a phase is said to take more than the driver saw, less than 0, or nothing was measured. No model is needed:
weights are drawn, for 28 layers of width 2,048 (1.6 billion). Needs one GPU, rlplug-rollout-vllm, rlplug-algos and
rlplug-optims; it takes about three minutes.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from out_of_memory import ROOT, write_model

from rlplug.cli.main import main as rlplug
from rlplug.observability.metrics_log import read_metrics
from rlplug.observability.phase_timer import PhaseTimer
from rlplug.types import GIB

SLACK_GIB = 0.25
"""What a peak may be above the driver's, which is read from time to time."""


class DriverPeaks:
    """Most memory of a GPU that was in use in each phase, by all processes, in GiB."""

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}
        self._phase = ""
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        while True:
            phase = self._phase
            free, total = torch.cuda.mem_get_info() if phase else (0, 0)
            if phase == self._phase:
                self.peaks[phase] = max(self.peaks.get(phase, 0.0), (total - free) / GIB)
            time.sleep(0.002)

    def follow(self) -> None:
        """Read in each phase of every timer from now on."""
        original = PhaseTimer.phase

        @contextmanager
        def followed(timer: PhaseTimer, name: str) -> Iterator[None]:
            self._phase = name
            try:
                with original(timer, name):
                    yield
            finally:
                self._phase = ""

        PhaseTimer.phase = followed  # type: ignore[method-assign, assignment]
        self._thread.start()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model and the run")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("arguments", nargs="*", help="of rlplug fit, after --")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model = write_model(options.out / "model", options.layers, options.hidden)
    arguments = ["-c", f"{ROOT}/configs/quickstart.yaml", "-c", f"{ROOT}/configs/rollout/vllm.yaml"]
    arguments += ["--model.policy.path", str(model), "--model.policy.dtype", "bfloat16", "--model.num_steps", "3"]
    arguments += ["--model.validation.at_start", "false", "--model.validation.every_n_steps", "null"]
    arguments += ["--model.memory.sleep_between_rollouts", "true", "--run.dir", str(options.out / "runs")]
    arguments += ["--run.export_policy", "false", "--run.report", "false", "--trainer.accelerator", "gpu"]
    driver = DriverPeaks()
    driver.follow()
    sys.argv = [str(Path(sys.executable).with_name("rlplug")), "fit", *arguments, *options.arguments]
    if code := rlplug():
        return code

    rows = read_metrics(max((options.out / "runs").iterdir()) / "metrics.jsonl")
    found = {name: [row[f"memory/{name}"] for row in rows if f"memory/{name}" in row] for name in driver.peaks}
    said = {name: (min(values), max(values)) for name, values in found.items() if values}
    freed = max(row.get("rollout/freed_gib", 0.0) for row in rows)
    print(f"the engine gave back {freed:.1f} GiB in its sleep")
    print(f"{'phase':12}{'memory/<phase>':>16}{'driver, all in use':>20}  GiB, most of {len(rows)} rows")
    failed = not freed
    for name, (least, most) in said.items():
        is_wrong = least < 0 or most > driver.peaks[name] + SLACK_GIB
        print(f"{name:12}{most:16.2f}{driver.peaks[name]:20.2f}{'  WRONG' if is_wrong else ''}")
        failed |= is_wrong
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
