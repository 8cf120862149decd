"""GRPO, DAPO and PPO train SmolLM2-135M-Instruct on a reasoning-gym task, on one GPU, with all weights or with LoRA.

    python benchmarks/algos_smollm2.py prompts OUT
    python benchmarks/algos_smollm2.py train OUT --model models/SmolLM2-135M-Instruct
    python benchmarks/algos_smollm2.py train OUT --model models/SmolLM2-135M-Instruct --only GRPO \\
        --variants full lora --seeds 3 --jobs 6 --rollout VLLMRollout --limit 400
    python benchmarks/algos_smollm2.py report OUT

``prompts`` writes the puzzles, 110 KiB (it needs reasoning-gym, no GPU). ``train`` trains, several runs at a time with
``--jobs``. After each run, and on ``report``, it writes a CSV of metrics for each run, ``table.md`` and ``curves.png``.
A run that fails, or that ``--limit`` ends, is left out of table and picture and named below the table. The engine is
the core's, transformers' own ``generate``, or with ``--rollout VLLMRollout`` vLLM.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplug.observability.metrics_log import read_metrics

TASK = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
"""Of ``chain_sum``: 8 + 35."""
NUM_PUZZLES, NUM_VAL = 3000, 200

ALGORITHMS: dict[str, dict[str, object]] = {
    "GRPO": {"aggregation": "sequence", "kl_coefficient": 0.001},
    "DAPO": {"max_refills": 2},
    "PPO": {"kl_coefficient": 0.001, "gae_lambda": 0.95},
}
CRITIC = {
    "warmup_steps": 5,
    "num_epochs": 2,
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 5e-5}},
}


def write_prompts(out: Path) -> None:
    """Write ``val.jsonl`` and ``train.jsonl``: no puzzle is in both, and none is there twice."""
    import reasoning_gym

    out.mkdir(parents=True, exist_ok=True)
    answers = {}
    for puzzle in reasoning_gym.create_dataset("chain_sum", size=NUM_PUZZLES, seed=1, **TASK):
        answers[puzzle["metadata"]["expression"]] = puzzle["answer"]
    rows = [
        json.dumps({"prompt": f"What is {expression}? Answer with the number only.", "answer": answer})
        for expression, answer in answers.items()
    ]
    (out / "val.jsonl").write_text("\n".join(rows[:NUM_VAL]) + "\n")
    (out / "train.jsonl").write_text("\n".join(rows[NUM_VAL:]) + "\n")


VARIANTS: dict[str, dict[str, str]] = {
    "full": {"model.optimizer.init_args.lr": "2e-5"},
    "lora": {"model.optimizer.init_args.lr": "2e-4", "model.lora": '{"rank": 16, "alpha": 32}'},
}
"""What trains, with its learning rate: adapters take about ten times that of all weights."""

ENGINES: dict[str, dict[str, Any]] = {
    "HFRollout": {},
    "VLLMRollout": {
        "enforce_eager": True,
        "kv_cache_gib": 2,
        "gpu_memory_utilization": 0.05,
        "max_model_len": 256,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 4096,
    },
}
"""``init_args``; vLLM's are small, so that several runs share a GPU, and start without compilation."""


@dataclass(frozen=True)
class Run:
    """One run."""

    algorithm: str
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.algorithm}-{self.variant}-{self.seed}"

    @property
    def kind(self) -> str:
        """Label of the runs that differ by their seed alone."""
        return f"{self.algorithm}, {self.variant}"


def runs_of(options: argparse.Namespace) -> list[Run]:
    return [Run(*parts) for parts in itertools.product(options.only, options.variants, range(options.seeds))]


def task_arguments(model: Path, puzzles: Path, accelerator: str, max_tokens: int) -> list[str]:
    """Return the options of ``rlplug fit`` that every run of the task has: policy, puzzles, reward and sampling.

    Args:
        model: Folder of the policy.
        puzzles: Folder with ``train.jsonl`` and ``val.jsonl``.
        accelerator: ``gpu`` or ``cpu``.
        max_tokens: Of a micro-batch.
    """
    line = [
        *("fit", "--config", "configs/quickstart.yaml", "--trainer.accelerator", accelerator),
        *("--trainer.devices", "1", "--model.policy.path", str(model.resolve()), "--model.policy.init", "pretrained"),
        *("--model.policy.dtype", "bfloat16" if accelerator == "gpu" else "float32"),
        *("--model.rewards", json.dumps([{"class_path": "ExactMatch", "init_args": {"answer_pattern": r"(-?\d+)"}}])),
        *("--data.chat", "true", "--model.sampling.max_new_tokens", "24", "--model.sampling.temperature", "0.7"),
        *("--model.batch.max_tokens_per_gpu", str(max_tokens), "--model.limits.max_grad_norm", "1.0"),
    ]
    for split in ("train", "val"):
        path = str(puzzles.resolve() / f"{split}.jsonl")
        line += [f"--data.{split}", json.dumps({"class_path": "FileSource", "init_args": {"path": path}})]
    return line


def arguments(run: Run, options: argparse.Namespace) -> list[str]:
    """Return the command line; all but algorithm, critic, variant and seed is the same for every run."""
    algorithm = {"class_path": run.algorithm, "init_args": ALGORITHMS[run.algorithm]}
    engine = {"class_path": options.rollout, "init_args": ENGINES[options.rollout]}
    line = [
        *task_arguments(options.model, options.out, options.accelerator, options.max_tokens),
        *("--seed_everything", str(run.seed)),
        *("--model.algorithm", json.dumps(algorithm), "--model.rollout", json.dumps(engine)),
        *("--model.batch.prompts_per_step", str(options.prompts), "--model.batch.group_size", "8"),
        *("--model.num_steps", str(options.steps), "--model.validation.every_n_steps", str(min(20, options.steps))),
        *("--checkpoint.every_n_steps", str(options.steps), "--checkpoint.keep", "1", "--run.export_policy", "false"),
        *("--run.report", "false", "--run.dir", str(options.out / "runs" / run.name)),
    ]
    for key, value in VARIANTS[run.variant].items():
        line += [f"--{key}", value]
    return [*line, "--model.critic", json.dumps(CRITIC)] if run.algorithm == "PPO" else line


def train(run: Run, options: argparse.Namespace, deadline: float) -> str:
    """Train one run, until the deadline at most; return what came of it."""
    log = options.out / f"{run.name}.log"
    shutil.rmtree(options.out / "runs" / run.name, ignore_errors=True)
    (options.out / f"{run.name}.jsonl").unlink(missing_ok=True)  # of an earlier run
    began, command = time.monotonic(), [sys.executable, "-m", "rlplug", *arguments(run, options)]
    environment = dict(os.environ)
    if options.jobs > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // options.jobs))
    with log.open("w") as file:
        try:
            left = max(0.0, deadline - began)
            code = subprocess.run(command, env=environment, stdout=file, stderr=file, timeout=left).returncode
            end = f"failed:\n{log.read_text()[-4000:]}" if code else "done"
        except subprocess.TimeoutExpired:
            end = "ended by --limit"
    return f"{run.name}: {time.monotonic() - began:.0f} s, {end}"


def column(rows: list[dict[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def read_runs(options: argparse.Namespace) -> tuple[dict[str, list[list[dict[str, float]]]], list[str]]:
    """Keep what runs have written as ``OUT/NAME.jsonl``; return whole runs by kind, and what to say of the others."""
    whole: dict[str, list[list[dict[str, float]]]] = {}
    others = []
    for run in runs_of(options):
        path = options.out / f"{run.name}.jsonl"
        for metrics in (options.out / "runs" / run.name).glob("[0-9]*/metrics.jsonl"):
            shutil.copy(metrics, path)
        rows = read_metrics(path)
        if not rows or rows[-1]["step"] < options.steps:
            others.append(f"{run.name} is left out: {rows[-1]['step'] if rows else 0} of {options.steps} steps")
        else:
            whole.setdefault(run.kind, []).append(rows)
    return whole, others


def table(results: dict[str, list[list[dict[str, float]]]]) -> str:
    """Return a row for each kind: over its seeds, the mean and in brackets the smallest and the largest."""
    lines = [
        "| runs | seeds | reward, first 5 steps | reward, last 5 | held-out pass@1, before | after | s/step (median) "
        "| mismatch, largest step mean | prompts rejected | refills a step | explained variance, last 10 "
        "| peak GiB in the update |",
        f"|{'---|' * 12}",
    ]
    for kind, runs in results.items():
        rewards, held_out = ([column(rows, name) for rows in runs] for name in ("reward/mean", "validate/pass@1"))
        explained = [values for rows in runs if (values := column(rows, "critic/explained_variance")[-10:])]
        cells = [
            _range([statistics.fmean(values[:5]) for values in rewards], ".3f"),
            _range([statistics.fmean(values[-5:]) for values in rewards], ".3f"),
            _range([values[0] for values in held_out], ".3f"),
            _range([values[-1] for values in held_out], ".3f"),
            _range([statistics.median(column(rows, "time/step")) for rows in runs], ".2f"),
            _range([max(column(rows, "mismatch/mean")) for rows in runs], ".4f"),
            _range([statistics.fmean(column(rows, "filter/rejected_groups")) for rows in runs], ".2f"),
            _range([statistics.fmean(column(rows, "filter/refills")) for rows in runs], ".2f"),
            _range([statistics.fmean(values) for values in explained], ".2f"),
            _range([max(column(rows, "memory/update")) for rows in runs], ".1f"),
        ]
        lines.append("| " + " | ".join([kind, str(len(runs)), *cells]) + " |")
    return "\n".join(lines) + "\n"


def _range(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def draw(results: dict[str, list[list[dict[str, float]]]], path: Path) -> None:
    """Draw each kind's mean over its seeds, and between the smallest and the largest a band."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), dpi=110)
    names = ("reward/mean", "validate/pass@1", "policy/entropy")
    titles = ("mean training reward", "held-out pass@1 (greedy)", "entropy, nats per token")
    for axis, name, title in zip(axes, names, titles, strict=True):
        for kind, runs in results.items():
            steps = [row["step"] for row in runs[0] if name in row]
            seeds = list(zip(*(column(rows, name) for rows in runs), strict=True))
            marker = "o" if name.startswith("validate") else None
            (line,) = axis.plot(steps, [statistics.fmean(values) for values in seeds], label=kind, marker=marker)
            axis.fill_between(steps, [*map(min, seeds)], [*map(max, seeds)], color=line.get_color(), alpha=0.2)
        axis.set(xlabel="step", title=title)
    axes[0].legend()
    figure.suptitle("SmolLM2-135M-Instruct on reasoning-gym's chain_sum: mean, smallest and largest over seeds")
    figure.tight_layout()
    figure.savefig(path)


def report(options: argparse.Namespace) -> str:
    """Write ``table.md`` and ``curves.png`` of the runs that ``OUT`` has; return the table."""
    results, others = read_runs(options)
    text = table(results) + "".join(f"\n{line}" for line in others)
    (options.out / "table.md").write_text(text)
    if results:
        draw(results, options.out / "curves.png")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prompts", "train", "report"))
    parser.add_argument("out", type=Path, help="folder for prompts and results")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=100, help="RL steps of a run")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step")
    parser.add_argument("--only", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS, help="of the algorithms")
    parser.add_argument("--variants", nargs="+", default=["full"], choices=VARIANTS, help="what trains")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each algorithm and variant")
    parser.add_argument("--rollout", default="HFRollout", choices=ENGINES, help="the engine")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--max-tokens", type=int, default=8192, help="of a micro-batch: 8192 take 10 GiB of a GPU")
    parser.add_argument("--limit", type=float, default=86400.0, metavar="S", help="end what still runs after S seconds")
    parser.add_argument("--accelerator", default="gpu", help="gpu, or cpu to try the script")
    options = parser.parse_args()
    if options.what == "prompts":
        return write_prompts(options.out)
    if options.what == "train":
        if options.model is None:
            parser.error("--model is missing: the folder of SmolLM2-135M-Instruct")
        deadline = time.monotonic() + options.limit
        with ThreadPoolExecutor(options.jobs) as pool:
            for done in as_completed([pool.submit(train, run, options, deadline) for run in runs_of(options)]):
                print(done.result(), flush=True)
                report(options)
    return print(report(options))


if __name__ == "__main__":
    main()
