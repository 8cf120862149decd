"""Trains a mixture of experts by each trainer and mesh, with the experts of the engine replayed and without.

    python benchmarks/experts.py --devices 2 --out OUT
    python benchmarks/experts.py --accelerator cpu --devices 2 --layers 2 --hidden 64 --experts 8 --rollout HFRollout \
        --prompts 2 --tokens 8 --out OUT

Weights are drawn once, in the shape of Qwen3-MoE, and all ways start from them with the same prompts and seeds. Printed
for each way: the first step's gradient norm and mismatch (mean difference of engine's and trainer's logprobs), the
share of tokens whose experts differ, and seconds and GiB of the update (the last step's). Ways of several ranks should
have the gradient norm of one rank, and replay a lower mismatch. Needs rlplug-algos, -rollout-vllm and -trainer-titan.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from rlplug.observability.metrics_log import read_metrics

ROOT: Final = Path(__file__).parents[1]
REPLAY: Final = ["--model.router_replay", "true"]
TITAN: Final = ["--model.trainer", "TorchTitan", "--model.trainer.init_args.expert"]
COLUMNS: Final = ("policy/grad_norm", "mismatch/mean", "router/differ", "loss")


def ways(devices: int) -> dict[str, list[str]]:
    """Return the arguments of each way by its name."""
    several = ["--trainer.devices", str(devices)]
    found = {
        "one rank": [],
        "one rank, replay": REPLAY,
        f"FSDP2 on {devices}, replay": [*several, *REPLAY],
        f"TorchTitan, experts over {devices}": [*several, *TITAN, str(devices)],
        f"TorchTitan, experts over {devices}, replay": [*several, *TITAN, str(devices), *REPLAY],
    }
    return found if devices > 1 else dict(list(found.items())[:2])


def write_model(folder: Path, options: argparse.Namespace) -> Path:
    """Write a policy with random weights in bfloat16, and the quickstart's tokenizer, where there is none yet."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    if (folder / "model.safetensors").exists():
        return folder
    shutil.copytree(ROOT / "examples/quickstart/model", folder, dirs_exist_ok=True)
    config = Qwen3MoeConfig(
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(2, options.hidden // 64),
        num_key_value_heads=max(2, options.hidden // 512),
        head_dim=64,
        moe_intermediate_size=3 * options.hidden // 8,
        num_experts=options.experts,
        num_experts_per_tok=min(8, options.experts // 2),
        norm_topk_prob=True,
        vocab_size=32768,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if options.accelerator == "gpu" else "cpu"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100GB")
    return folder


def train(name: str, arguments: list[str], model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a way; return its line."""
    runs = options.out / name.replace(" ", "-").replace(",", "")
    command = [sys.executable, "-m", "rlplug", "fit", "-c", "configs/quickstart.yaml", *arguments]
    command += ["--model.policy.path", str(model), "--model.policy.init", "pretrained", "--run.dir", str(runs)]
    command += ["--model.policy.dtype", "bfloat16" if options.accelerator == "gpu" else "float32"]
    command += ["--trainer.accelerator", options.accelerator, "--model.rollout", options.rollout]
    command += ["--model.num_steps", str(options.steps), "--model.batch.prompts_per_step", str(options.prompts)]
    command += ["--model.batch.group_size", "8", "--model.sampling.max_new_tokens", str(options.tokens)]
    command += ["--model.batch.max_tokens_per_gpu", "16384", "--model.algorithm.entropy_coefficient", "0.01"]
    command += ["--model.validation.at_start", "false", "--model.validation.every_n_steps", "null"]
    command += ["--model.limits.mismatch_gate", "null", "--run.export_policy", "false", "--run.report", "false"]
    command += options.rlplug
    began = time.perf_counter()
    code: int | str = "timeout"
    with (options.out / f"{runs.name}.log").open("w") as log, contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False, timeout=options.limit
        )
        code = done.returncode
    line: dict[str, Any] = {"way": name, "status": code, "s": round(time.perf_counter() - began)}
    rows = read_metrics(file) if (file := runs / "001" / "metrics.jsonl").exists() else []
    if rows:  # a checkpoint of its end may take longer than its steps
        line |= {column: rows[0][column] for column in COLUMNS if column in rows[0]}
        line |= {column: round(rows[-1][column], 3) for column in ("time/update", "memory/update", "time/step")}
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--devices", type=int, default=2)
    add("--accelerator", choices=("gpu", "cpu"), default="gpu")
    add("--rollout", default="VLLMRollout")
    add("--layers", type=int, default=12)
    add("--hidden", type=int, default=2048)
    add("--experts", type=int, default=32)
    add("--prompts", type=int, default=16)
    add("--tokens", type=int, default=256)
    add("--steps", type=int, default=2)
    add("--limit", type=int, default=180, help="seconds of a way")
    add("--only", nargs="*", help="ways whose names hold one of these")
    add("--out", type=Path, required=True, help="folder of the model, runs and experts.jsonl")
    add("rlplug", nargs="*", help="after --: options of rlplug fit, for all ways")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    model = write_model(options.out / "model", options)
    for name, arguments in ways(options.devices).items():
        if options.only and not any(part in name for part in options.only):
            continue
        line = json.dumps(train(name, arguments, model, options))
        print(line, flush=True)
        with (options.out / "experts.jsonl").open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
