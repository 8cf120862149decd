"""A run folder as a run leaves it, with made-up numbers."""

from __future__ import annotations

import csv
import json
import math
import random
from pathlib import Path
from typing import Any

from rlplug_async.replay import GroupSchedule

RUN = {
    "status": "finished",
    "started": "2026-11-20T21:04:11+00:00",
    "finished": "2026-11-20T21:41:53+00:00",
    "versions": {"rlplug": "0.1.0", "torch": "2.12.0", "lightning": "2.6.1", "transformers": "5.9.0", "vllm": "0.22.0"},
    "plugins": [
        {"name": "algos", "distribution": "rlplug-algos", "version": "0.1.0", "state": "loaded"},
        {"name": "vllm", "distribution": "rlplug-rollout-vllm", "version": "0.1.0", "state": "loaded"},
        {
            "name": "optims",
            "distribution": "rlplug-optims",
            "version": "0.1.0",
            "state": "blocked",
            "reason": "by name",
        },
    ],
    "device": "NVIDIA H200",
    "world_size": 2,
    "batch_plan": [
        ["prompts_per_step", "32", "prompts drawn in each step, over all ranks"],
        ["group_size", "8", "completions of each prompt"],
        ["mini_batch_size", "128 sequences", "each optimizer step sees this many: 2 optimizer steps a step"],
        ["max_tokens_per_gpu", "16,384", "a micro-batch is packed up to this; about 5 micro-batches in a mini-batch"],
    ],
    "changes": [{"since": "step-00000004", "effect": "allowed", "what": "data answers: 3f2a -> 9b1c"}],
    "effects": ["Liger replaced 57 modules", "forward prefetch set on 28 modules"],
    "message": None,
}

CONFIG = """\
seed_everything: 7
model:
  class_path: rlplug.module.RLModule
  init_args:
    policy: {path: Qwen/Qwen3-0.6B, dtype: bfloat16}
    algorithm: {class_path: GRPO, init_args: {clip_low: 0.2, clip_high: 0.28, kl_coefficient: 0.001}}
    rollout: {class_path: VLLMRollout, init_args: {gpu_memory_utilization: 0.55}}
    rewards:
      - {class_path: MathVerify, init_args: {weight: 1.0}}
      - {class_path: RegexFormat, init_args: {weight: 0.1}}
trainer: {max_steps: 160, precision: bf16-true}
"""


def metric_rows(num_steps: int) -> list[dict[str, float]]:
    """Return the metrics of a run that learns arithmetic: a noisy logistic curve, shorter completions, less entropy."""
    noise = random.Random(7)
    rows: list[dict[str, float]] = []
    for step in range(num_steps):
        learned = 1 / (1 + math.exp(-(step - num_steps * 0.38) / (num_steps * 0.11)))
        solved = min(0.98, max(0.0, 0.09 + 0.72 * learned + noise.gauss(0, 0.045)))
        tagged = min(1.0, 0.15 + 0.84 * min(1.0, step / (num_steps * 0.3)) + noise.gauss(0, 0.012))
        length = 212 - 74 * learned + noise.gauss(0, 7)
        mismatch = 0.0031 * math.exp(noise.gauss(0, 0.18)) * (1 + 0.5 * learned)
        times = {
            "prompts": 0.02,
            "sync": 0.2,
            "rollout": 4.1 + length / 40 + abs(noise.gauss(0, 0.35)),
            "rewards": 0.35 + abs(noise.gauss(0, 0.12)),
            "filter": 0.01,
            "logprobs": 1.05 + noise.gauss(0, 0.04),
            "advantages": 0.02,
            "update": 3.6 + length / 90 + noise.gauss(0, 0.1),
            "publish": 0.62 + abs(noise.gauss(0, 0.05)),
        }
        whole = sum(times.values()) + 0.4
        row = {
            "step": step,
            "reward/mean": solved + 0.1 * tagged,
            "reward/std": math.sqrt(max(0.0, solved * (1 - solved))),
            "reward/math": solved,
            "reward/format": tagged,
            "reward/error_share": 0.004 if step % 23 == 7 else 0.0,
            "completion/length_mean": length,
            "completion/length_max": min(384.0, length * 1.9 + abs(noise.gauss(0, 30))),
            "completion/truncated_share": max(0.0, 0.11 - 0.1 * learned + noise.gauss(0, 0.008)),
            "throughput/tokens_per_s": 256 * length / whole,
            "mismatch/mean": mismatch,
            "mismatch/max": mismatch * 90 * math.exp(noise.gauss(0, 0.5)),
            "policy/kl": 0.021 * learned * (1 + noise.gauss(0, 0.08)),
            "policy/entropy": 0.46 - 0.29 * learned + noise.gauss(0, 0.012),
            "policy/clip_fraction_low": max(0.0, 0.006 + 0.004 * learned + noise.gauss(0, 0.0012)),
            "policy/clip_fraction_high": max(0.0, 0.004 + 0.004 * learned + noise.gauss(0, 0.0012)),
            "advantages/degenerate_groups": max(0.0, 0.3 - 0.1 * learned + noise.gauss(0, 0.02)),
            "policy/grad_norm": 0.42 - 0.2 * learned + abs(noise.gauss(0, 0.05)),
            "policy/lr": 1e-6 * min(1.0, (step + 1) / 10),
            "loss": noise.gauss(0, 0.004),
            **{f"time/{phase}": seconds for phase, seconds in times.items()},
            "time/step": whole,
            "memory/rollout": 71.4,
            "memory/logprobs": 38.2 + noise.gauss(0, 0.3),
            "memory/update": 58.9 + noise.gauss(0, 0.6),
            "memory/publish": 33.0,
        }
        if step % 20 == 0 or step == num_steps - 1:
            row |= {"validate/reward_mean": solved - 0.02, "validate/pass@1": solved - 0.03}
            row |= {"validate/pass@4": min(0.99, solved + 0.13)}
        rows.append(row)
    return rows


def sample_rows(num_steps: int) -> list[dict[str, Any]]:
    """Return a few samples of every fifth step: additions, some wrong, some cut off, one whose reward failed."""
    noise = random.Random(11)
    rows: list[dict[str, Any]] = []
    for step in range(0, num_steps, 5):
        for index in range(6):
            a, b = noise.randint(12, 980), noise.randint(12, 980)
            is_right, is_cut = noise.random() < 0.15 + 0.75 * step / num_steps, index == 5
            thought = f"{a} + {b}: first the tens, then the ones. " * (12 if is_cut else 2)
            text = f"<think>\n{thought}\n</think>\n\n" + f"The sum is \\boxed{{{a + b if is_right else a + b + 10}}}."
            value = float(is_right and not is_cut)
            failed = index == 2 and step % 40 == 35
            rows.append(
                {
                    "step": step,
                    "phase": "validate" if step % 20 == 0 and index == 0 else "train",
                    "prompt_uid": f"train.jsonl:{noise.randint(0, 900)}",
                    "prompt": f"<|im_start|>user\nWhat is {a} + {b}? Put the answer in \\boxed{{}}.<|im_end|>\n",
                    "completion": thought * 3 if is_cut else text,
                    "answer": a + b,
                    "reward": None if failed else value + 0.1 * (not is_cut),
                    "rewards": {
                        "math": {"error": "TimeoutError: no verdict within 5 s"} if failed else value,
                        "format": float(not is_cut),
                    },
                    "finish_reason": "length" if is_cut else "stop",
                    "num_tokens": 384 if is_cut else noise.randint(70, 160),
                }
            )
    return rows


def write_metrics(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def lines_of(table: str) -> str:
    """Return a table, names in its first line, as lines of ``metrics.jsonl``; an empty cell is no metric."""
    rows = csv.DictReader(table.splitlines())
    records = [{name: _value(cell) for name, cell in row.items() if cell} for row in rows]
    return "".join(json.dumps(record) + "\n" for record in records)


def _value(cell: str) -> float | str:
    number = float(cell)
    text = {math.inf: "Infinity", -math.inf: "-Infinity"}.get(number, "NaN")
    return (int(number) if cell.isdigit() else number) if math.isfinite(number) else text


def write_samples(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(run_dir: Path, num_steps: int = 160) -> Path:
    """Write a complete run folder and return it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_metrics(run_dir, metric_rows(num_steps))
    write_samples(run_dir, sample_rows(num_steps))
    (run_dir / "run.json").write_text(json.dumps(RUN))
    (run_dir / "config.yaml").write_text(CONFIG)
    return run_dir


def timeline_line(step: int) -> str:
    """Return a line of ``groups.jsonl``.

    Each step takes ten seconds, in one of which the engine is paused, and odd ones have a validation to second 4.
    """
    schedule = GroupSchedule({"seed": 0})
    schedule.begin(step)
    at = 1e9 + 10 * step
    timeline = {
        "phases": [["rollout", at, at + 4], ["update", at + 4, at + 9], ["strange", at + 9, at + 10]],
        "engine": [[at, "weight sync"], [at + 1, "generating"], [at + 9, "pausing"]],
        "requests": [[at + 1, 8, step % 2 * 5], [at + 4, 3, 0]],
    }
    return schedule.line(timeline)
