"""Trains the same run with several rollout engines and lays their learning curves over each other.

``python benchmarks/engine_curves.py --out OUT --engines HFRollout VLLMRollout`` trains the quickstart, on a GPU if
there is one; ``--model FOLDER`` trains SmolLM2-135M-Instruct on sums on a GPU instead, each engine on one of its own
when there are several. It writes a CSV of metrics for each engine, prints a summary, and ``--plot FILE`` draws all the
CSVs of OUT.

``--qwen3`` trains the quickstart's model in the shape of Qwen3, which every engine holds in FP8: SGLang 0.5.16 drops
the scales of a Llama. ``--arguments ENGINE KEY=VALUE ...``, once for an engine, are arguments of its run alone. Engines
that need environments of their own are trained in calls of their own, with the same OUT; ``--engines`` with nothing
behind it only plots.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gpu_check import QUICKSTART, run, smollm2

from rlplug.observability.metrics_log import read_metrics

WINDOW = 10
"""Steps over which the plot averages."""


def arguments_of(engine: str, options: argparse.Namespace) -> list[str]:
    """Return the command line of one engine's run."""
    if options.model is None:
        base = [*QUICKSTART, "--trainer.accelerator", "gpu" if torch.cuda.is_available() else "cpu"]
        base += ["--model.policy.path", str(qwen3_model(options.out))] if options.qwen3 else []
    else:
        base = smollm2(options.model, options.out, options.steps)
    chosen = ["--model.rollout", engine]
    for key, value in options.arguments.get(engine, {}).items():
        chosen += [f"--{key}", value]
    return [*base, "--model.num_steps", str(options.steps), *chosen]


def qwen3_model(out: Path) -> Path:
    """Write the quickstart's model folder with the configuration of a Qwen3 of the same sizes; return it."""
    folder = out / "qwen3"
    shutil.copytree("examples/quickstart/model", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_arguments(groups: list[list[str]], engines: list[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return keys with values for each engine that has some."""
    found: dict[str, dict[str, str]] = {}
    for engine, *pairs in groups:
        if engine not in engines or engine in found:
            parser.error(f"--arguments {engine}: give it once, for one of --engines {' '.join(engines)}")
        for pair in pairs:
            if "=" not in pair:
                parser.error(f"--arguments {engine} {pair}: write KEY=VALUE, such as model.rollout.max_num_seqs=128")
        found[engine] = dict(pair.split("=", 1) for pair in pairs)
    return found


def plot(folder: Path, file: Path) -> None:
    """Draw the mean reward of every run in ``folder``, per step and averaged."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for path in sorted(folder.glob("*.metrics.jsonl")):
        rewards = [row["reward/mean"] for row in read_metrics(path) if "loss" in row]
        smooth = [sum(rewards[max(0, i - WINDOW) : i]) / min(i, WINDOW) for i in range(1, len(rewards) + 1)]
        (line,) = axes.plot(range(1, len(rewards) + 1), smooth, label=path.name.removesuffix(".metrics.jsonl"))
        axes.plot(range(1, len(rewards) + 1), rewards, color=line.get_color(), alpha=0.25, linewidth=0.8)
    axes.set(xlabel="step", ylabel="mean reward")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engines", nargs="*", default=["HFRollout", "VLLMRollout"])
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--qwen3", action="store_true", help="without --model: the quickstart's model as a Qwen3")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument(
        "--arguments", nargs="+", action="append", default=[], metavar=("ENGINE", "KEY=VALUE"), help="of its run alone"
    )
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    options.arguments = read_arguments(options.arguments, options.engines, parser)
    options.out.mkdir(parents=True, exist_ok=True)
    devices = []
    if options.model:
        every = ",".join(map(str, range(torch.cuda.device_count())))
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")

    def train(number: int, engine: str) -> dict[str, object]:
        environment = {"CUDA_VISIBLE_DEVICES": devices[number % len(devices)]} if devices else {}
        return run(engine, arguments_of(engine, options), options.out, os.environ | environment)

    has_failed = False
    with ThreadPoolExecutor(len(devices) or 1) as pool:
        for summary in pool.map(train, range(len(options.engines)), options.engines):
            print(json.dumps(summary), flush=True)
            has_failed |= "exit code" in summary
    if options.plot:
        plot(options.out, options.plot)
    raise SystemExit(has_failed)


if __name__ == "__main__":
    main()
