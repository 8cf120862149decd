"""Runs the core on GPUs: the quickstart on one and on two, then GRPO of SmolLM2-135M-Instruct in bf16 on sums.

``python benchmarks/gpu_check.py --model models/SmolLM2-135M-Instruct --out OUT`` needs a GPU, two for the comparison.
It prints, per run: first and last mean reward, seconds per step (median, without the first), mismatch, peak memory.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from rlplug.observability.metrics_log import read_metrics

QUICKSTART = ["fit", "--config", "configs/quickstart.yaml", "--trainer.accelerator", "gpu", "--run.report", "false"]


def write_sums(out: Path) -> None:
    """Write "What is 7 + 12?" for all pairs up to 20, with answers; a fifth of the pairs is held out."""
    pairs = [(a, b) for a in range(1, 21) for b in range(1, 21)]
    random.Random(0).shuffle(pairs)
    for name, chosen in (("val", pairs[:80]), ("train", pairs[80:])):
        rows = [{"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)} for a, b in chosen]
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def smollm2(model: Path, out: Path, num_steps: int) -> list[str]:
    """Return the command line that trains SmolLM2 on sums, with exact match as the reward."""
    rewards = [{"class_path": "ExactMatch", "init_args": {"answer_pattern": r"(-?\d+)"}}]
    write_sums(out)
    source = {"class_path": "FileSource", "init_args": {"path": str(out / "train.jsonl")}}
    held_out = {"class_path": "FileSource", "init_args": {"path": str(out / "val.jsonl")}}
    return [
        *("fit", "--config", "configs/quickstart.yaml", "--trainer.accelerator", "gpu", "--run.report", "false"),
        *("--model.policy.path", str(model), "--model.policy.init", "pretrained", "--model.policy.dtype", "bfloat16"),
        *(
            "--model.rewards",
            json.dumps(rewards),
            "--data.train",
            json.dumps(source),
            "--data.val",
            json.dumps(held_out),
        ),
        *("--data.chat", "true", "--model.sampling.max_new_tokens", "24", "--model.optimizer.init_args.lr", "1e-5"),
        *(
            "--model.limits.max_grad_norm",
            "1.0",
            "--model.num_steps",
            str(num_steps),
            "--model.validation.every_n_steps",
            "20",
        ),
        *("--model.batch.prompts_per_step", "32", "--model.batch.max_tokens_per_gpu", "16384"),
    ]


def run(name: str, arguments: list[str], out: Path, environment: Mapping[str, str] | None = None) -> dict[str, object]:
    """Run one command line and summarise its metrics."""
    command = [sys.executable, "-m", "rlplug", *arguments, "--run.dir", str(out / name)]
    with (out / f"{name}.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if code:
        print((out / f"{name}.log").read_text()[-3000:])
        return {"run": name, "exit code": code}
    folder = max((out / name).iterdir())
    (out / f"{name}.metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes())
    every = read_metrics(folder / "metrics.jsonl")
    rows = [row for row in every if "loss" in row]
    validated = [row for row in every if "validate/pass@1" in row]
    rewards = [row["reward/mean"] for row in rows]
    return {
        "run": name,
        "steps": len(rows),
        "reward first 5": round(statistics.fmean(rewards[:5]), 3),
        "reward last 5": round(statistics.fmean(rewards[-5:]), 3),
        "s/step": round(statistics.median(row["time/step"] for row in rows[1:]), 3),
        "mismatch mean": f"{rows[0]['mismatch/mean']:.1e}",
        "mismatch max": f"{max(row['mismatch/max'] for row in rows):.1e}",
        "validation": " ".join(f"{row['validate/pass@1']:.3f}" for row in validated),
        "update GiB": round(max(row["memory/update"] for row in rows), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, required=True, help="where logs and metrics go")
    parser.add_argument("--steps", type=int, default=60, help="of SmolLM2")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print("torch", torch.__version__, torch.cuda.get_device_name(), "x", torch.cuda.device_count(), flush=True)
    for devices in range(1, min(torch.cuda.device_count(), 2) + 1):
        arguments = [*QUICKSTART, "--trainer.devices", str(devices), "--model.num_steps", "60"]
        print(run(f"quickstart-{devices}-gpu", arguments, options.out), flush=True)
    for devices in range(1, min(torch.cuda.device_count(), 2) + 1):
        arguments = [*smollm2(options.model, options.out, options.steps), "--trainer.devices", str(devices)]
        print(run(f"smollm2-{devices}-gpu", arguments, options.out), flush=True)


if __name__ == "__main__":
    main()
