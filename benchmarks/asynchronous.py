"""The quickstart's task, synchronous, stopping when enough, and asynchronous at several bounds: rewards by samples.

``python benchmarks/asynchronous.py --out OUT`` needs one CPU core and about a minute a run. All modes share policy,
prompts, sampling, optimizer, importance correction and engine, transformers' ``generate`` in a thread beside the
trainer. ``OUT`` gets ``table.md``, ``curves.csv`` and ``curves.png``. A run that ``OUT`` has from before is read, and
not run again.
"""

from __future__ import annotations

import argparse
import csv
import os
import queue
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlplug.interfaces import Bucket, EngineCapabilities, Placement, PolicySpec, RolloutEngine, SyncReport
from rlplug.rollout.hf_engine import HFRollout
from rlplug.types import Completion, Request, SamplingParams

MODES: dict[str, list[str]] = {
    "synchronous": [],
    "stop when enough, 1.5": ["--model.partial_rollout", "{over_provisioning: 1.5, max_staleness: 2}"],
    **{
        f"asynchronous, K = {bound}": ["--model.partial_rollout", f"{{asynchronous: true, max_staleness: {bound}}}"]
        for bound in (1, 2, 4)
    },
}
WINDOW = 5
"""Steps that rewards are averaged over."""
COLUMNS = ("step", "reward/mean", "partial/staleness_mean", "partial/staleness_max", "partial/resumed", "time/step")


class StreamingHF(RolloutEngine):
    """Streams from an ``HFRollout`` in a thread, in batches of what was submitted; an abort ends the whole batch.

    The trainer aborts all requests at once, unless trajectories have a deadline, which these runs have not.
    """

    capabilities = EngineCapabilities(streaming=True, disaggregated=True)

    def __init__(self, max_batch_size: int = 64) -> None:
        self._inner = HFRollout(max_batch_size)
        self._is_cut = threading.Event()
        self._inner.is_stopping = self._is_cut.is_set

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        self._inner.start(policy, placement)
        self._waiting: queue.SimpleQueue[tuple[Request, SamplingParams] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._num_running = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch = [first]
            while len(batch) < self._inner.max_batch_size and not self._waiting.empty():
                if (more := self._waiting.get()) is None:
                    return
                batch.append(more)
            for completion in self._inner.generate([request for request, _ in batch], first[1]):
                self._done.put(completion)

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        self._is_cut.clear()
        return self._inner.generate(requests, sampling)

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        self._is_cut.clear()  # nothing runs: a submit after an abort follows the last of its completions
        self._num_running += len(requests)
        for request in requests:
            self._waiting.put((request, sampling))

    def collect(self, timeout_s: float) -> list[Completion]:
        found: list[Completion] = []
        try:
            found.append(self._done.get(timeout=timeout_s))
            while True:
                found.append(self._done.get_nowait())
        except queue.Empty:
            self._num_running -= len(found)
            return found

    def abort(self, request_ids: Sequence[str]) -> None:
        assert len(request_ids) == self._num_running, "all are aborted at once"
        self._is_cut.set()

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        return self._inner.update_weights(buckets, version)

    def stats(self) -> dict[str, float]:
        return self._inner.stats()

    def close(self) -> None:
        self._is_cut.set()
        self._waiting.put(None)
        self._thread.join()
        self._is_cut.clear()
        self._inner.close()


def train(mode: str, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one mode, unless ``OUT`` has its run already, and return the rows of its metrics."""
    out = options.out / "runs" / f"{mode}-{seed}".replace(", ", "-").replace(" ", "-")
    if not (out / "001" / "policy").exists():
        shutil.rmtree(out, ignore_errors=True)
        steps = str(options.steps)
        command = [
            *("fit", "--config", "configs/quickstart.yaml", "--run.report", "false", "--run.dir", str(out)),
            *("--model.num_steps", steps, "--checkpoint.every_n_steps", steps, "--model.seed", str(seed)),
            *("--model.policy.seed", str(seed), "--model.validation.every_n_steps", steps),
            *("--model.validation.at_start", "false", "--model.batch.prompts_per_step", str(options.prompts)),
            *("--model.rollout", "asynchronous.StreamingHF", "--model.algorithm.correction", "{}", *MODES[mode]),
        ]
        path = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        subprocess.run([sys.executable, "-m", "rlplug", *command], env=environment, check=True)
    with (out / "001" / "metrics.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row.get("reward/mean")]


def table(runs: dict[str, list[list[dict[str, Any]]]]) -> str:
    """Return a row per mode: over its seeds, the mean and in brackets the smallest and the largest."""
    lines = [
        f"| mode | seeds | reward, last {WINDOW} steps | held-out pass@1 | staleness, mean | largest "
        "| trajectories resumed a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for mode, rows in runs.items():
        late = [[float(row["reward/mean"]) for row in run[-WINDOW:]] for run in rows]
        solved = [float(run[-1]["validate/pass@1"]) for run in rows]
        partial = [[float(row.get(name) or 0) for run in rows for row in run] for name in COLUMNS[2:5]]
        lines.append(
            f"| {mode} | {len(rows)} | {_range([statistics.fmean(values) for values in late])} | {_range(solved)} "
            f"| {statistics.fmean(partial[0]):.2f} | {max(partial[1]):.0f} | {statistics.fmean(partial[2]):.1f} |"
        )
    return "\n".join(lines) + "\n"


def _range(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def write_curves(runs: dict[str, list[list[dict[str, Any]]]], samples_per_step: int, out: Path) -> None:
    """Write ``curves.csv`` and ``curves.png``."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with (out / "curves.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["mode", "seed", "samples", *COLUMNS])
        for mode, rows in runs.items():
            for seed, run in enumerate(rows):
                for row in run:
                    cells = [f"{float(row[name]):.4g}" if row.get(name) else "" for name in COLUMNS]
                    writer.writerow([mode, seed, int(row["step"]) * samples_per_step, *cells])
    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=120)
    for mode, rows in runs.items():
        rewards = [[float(row["reward/mean"]) for row in run] for run in rows]
        means = [statistics.fmean(values) for values in zip(*rewards, strict=False)]
        axes.plot([samples_per_step * n for n in range(1, len(means) + 1)], means, label=mode, linewidth=1.2)
    axes.set(xlabel="samples trained on", ylabel="mean reward", title="Mean reward over seeds, from random weights")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "curves.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each mode")
    parser.add_argument("--steps", type=int, default=120, help="RL steps of a run")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step, of 8 completions each")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[list[dict[str, Any]]]] = {mode: [] for mode in MODES}
    for seed in range(options.seeds):
        for mode in MODES:
            runs[mode].append(train(mode, seed, options))
        (options.out / "table.md").write_text(table(runs))
        write_curves(runs, 8 * options.prompts, options.out)
    print((options.out / "table.md").read_text())


if __name__ == "__main__":
    main()
