"""GRPO, DAPO and PPO train SmolLM2-135M-Instruct on a reasoning-gym task, on one GPU.

``python benchmarks/algos_smollm2.py prompts OUT`` writes the puzzles (it needs reasoning-gym, no GPU);
``python benchmarks/algos_smollm2.py train OUT --model models/SmolLM2-135M-Instruct`` trains, and writes a CSV of
metrics for each algorithm; ``python benchmarks/algos_smollm2.py report OUT`` writes ``table.md`` and ``curves.png``.
The engine is the core's, transformers' own ``generate``.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

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


def arguments(algorithm: str, options: argparse.Namespace) -> list[str]:
    """Return the command line; all but algorithm and critic is the same for every run."""
    sources = {
        split: json.dumps({"class_path": "FileSource", "init_args": {"path": str(options.out / f"{split}.jsonl")}})
        for split in ("train", "val")
    }
    line = [
        *("fit", "--config", "configs/quickstart.yaml", "--trainer.accelerator", options.accelerator),
        *("--model.policy.path", str(options.model), "--model.policy.init", "pretrained"),
        *("--model.policy.dtype", "bfloat16" if options.accelerator == "gpu" else "float32"),
        *("--model.algorithm", json.dumps({"class_path": algorithm, "init_args": ALGORITHMS[algorithm]})),
        *("--model.rewards", json.dumps([{"class_path": "ExactMatch", "init_args": {"answer_pattern": r"(-?\d+)"}}])),
        *("--data.train", sources["train"], "--data.val", sources["val"], "--data.chat", "true"),
        *("--model.sampling.max_new_tokens", "24", "--model.sampling.temperature", "0.7"),
        *("--model.optimizer.init_args.lr", "2e-5"),
        *("--model.batch.prompts_per_step", str(options.prompts), "--model.batch.group_size", "8"),
        *("--model.batch.max_tokens_per_gpu", "16384", "--model.limits.max_grad_norm", "1.0"),
        *("--model.num_steps", str(options.steps), "--model.validation.every_n_steps", "20"),
        *("--checkpoint.every_n_steps", str(options.steps), "--checkpoint.keep", "1", "--run.export_policy", "false"),
        *("--run.report", "false", "--run.dir", str(options.out / "runs" / algorithm)),
    ]
    return [*line, "--model.critic", json.dumps(CRITIC)] if algorithm == "PPO" else line


def train(algorithm: str, options: argparse.Namespace) -> None:
    """Run one algorithm and keep its metrics as ``OUT/<algorithm>.csv``."""
    log = options.out / f"{algorithm}.log"
    began = time.monotonic()
    with log.open("w") as file:
        command = [sys.executable, "-m", "rlplug", *arguments(algorithm, options)]
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise SystemExit(f"{algorithm}:\n{log.read_text()[-4000:]}")
    folder = max((options.out / "runs" / algorithm).glob("[0-9]*"))
    shutil.copy(folder / "metrics.csv", options.out / f"{algorithm}.csv")
    print(f"{algorithm}: {time.monotonic() - began:.0f} s", flush=True)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name)]


def table(results: dict[str, list[dict[str, str]]]) -> str:
    lines = [
        "| algorithm | reward, first 5 steps | reward, last 5 | held-out pass@1, before | after | s/step (median) "
        "| prompts rejected | refills a step | explained variance, last 10 | peak GiB in the update |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for algorithm, rows in results.items():
        rewards, held_out = column(rows, "reward/mean"), column(rows, "validate/pass@1")
        explained = column(rows, "critic/explained_variance")[-10:]
        cells = [
            f"{statistics.fmean(rewards[:5]):.3f}",
            f"{statistics.fmean(rewards[-5:]):.3f}",
            f"{held_out[0]:.3f}",
            f"{held_out[-1]:.3f}",
            f"{statistics.median(column(rows, 'time/step')):.2f}",
            f"{statistics.fmean(column(rows, 'filter/rejected_groups')):.2f}",
            f"{statistics.fmean(column(rows, 'filter/refills')):.2f}",
            f"{statistics.fmean(explained):.2f}" if explained else "-",
            f"{max(column(rows, 'memory/update')):.1f}",
        ]
        lines.append("| " + " | ".join([algorithm, *cells]) + " |")
    return "\n".join(lines) + "\n"


def draw(results: dict[str, list[dict[str, str]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), dpi=110)
    names = ("reward/mean", "validate/pass@1", "policy/entropy")
    titles = ("mean training reward", "held-out pass@1 (greedy)", "entropy, nats per token")
    for axis, name, title in zip(axes, names, titles, strict=True):
        for algorithm, rows in results.items():
            points = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
            axis.plot(*zip(*points, strict=True), label=algorithm, marker="o" if name.startswith("validate") else None)
        axis.set(xlabel="step", title=title)
    axes[0].legend()
    figure.suptitle("SmolLM2-135M-Instruct on reasoning-gym's chain_sum")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prompts", "train", "report"))
    parser.add_argument("out", type=Path, help="folder for prompts and results")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=100, help="RL steps of a run")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step")
    parser.add_argument("--only", nargs="+", default=list(ALGORITHMS), help="some of the algorithms")
    parser.add_argument("--accelerator", default="gpu", help="gpu, or cpu to try the script")
    options = parser.parse_args()
    if options.what == "prompts":
        return write_prompts(options.out)
    if options.what == "train":
        for algorithm in options.only:
            train(algorithm, options)
    results = {algorithm: read(options.out / f"{algorithm}.csv") for algorithm in options.only}
    (options.out / "table.md").write_text(table(results))
    draw(results, options.out / "curves.png")
    return print((options.out / "table.md").read_text())


if __name__ == "__main__":
    main()
