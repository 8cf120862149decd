"""Trains the same run with several rollout engines and lays their learning curves over each other.

``python benchmarks/engine_curves.py --out OUT --engines HFRollout VLLMRollout`` trains the quickstart on the CPU;
``--model FOLDER`` trains SmolLM2-135M-Instruct on sums on a GPU instead, each engine on one of its own when there are
several. It writes a CSV of metrics for each engine, prints a summary, and ``--plot FILE`` draws all the CSVs of OUT.
"""

from __future__ import annotations

import argparse
import csv
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from gpu_check import QUICKSTART, run, smollm2

WINDOW = 10
"""Steps over which the plot averages."""


def arguments_of(engine: str, options: argparse.Namespace) -> list[str]:
    """Return the command line of one engine's run."""
    if options.model is None:
        base = [*QUICKSTART, "--trainer.accelerator", "cpu"]
    else:
        base = smollm2(options.model, options.out, options.steps)
    chosen = ["--model.rollout", engine]
    if engine.startswith("VLLM"):
        chosen += options.vllm
    return [*base, "--model.num_steps", str(options.steps), *chosen]


def plot(folder: Path, file: Path) -> None:
    """Draw the mean reward of every CSV in ``folder``, per step and averaged."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as source:
            rewards = [float(row["reward/mean"]) for row in csv.DictReader(source) if row["loss"]]
        smooth = [sum(rewards[max(0, i - WINDOW) : i]) / min(i, WINDOW) for i in range(1, len(rewards) + 1)]
        (line,) = axes.plot(range(1, len(rewards) + 1), smooth, label=path.stem)
        axes.plot(range(1, len(rewards) + 1), rewards, color=line.get_color(), alpha=0.25, linewidth=0.8)
    axes.set(xlabel="step", ylabel="mean reward")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engines", nargs="*", default=["HFRollout", "VLLMRollout"])
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--vllm", nargs=argparse.REMAINDER, default=[], help="arguments of the runs with vLLM; last")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    devices = []
    if options.model:
        every = ",".join(map(str, range(torch.cuda.device_count())))
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")

    def train(number: int, engine: str) -> dict[str, object]:
        environment = {"CUDA_VISIBLE_DEVICES": devices[number % len(devices)]} if devices else {}
        return run(engine, arguments_of(engine, options), options.out, os.environ | environment)

    with ThreadPoolExecutor(len(devices) or 1) as pool:
        for summary in pool.map(train, range(len(options.engines)), options.engines):
            print(summary, flush=True)
    if options.plot:
        plot(options.out, options.plot)


if __name__ == "__main__":
    main()
