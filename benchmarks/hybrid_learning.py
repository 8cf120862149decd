"""Trains the quickstart's task with a hybrid policy and with a dense one of the same sizes, on one GPU.

    python benchmarks/hybrid_learning.py --out OUT
    python benchmarks/hybrid_learning.py --shape tiny --rollout HFRollout --steps 4 --out OUT

Both start from random weights, in Qwen3.5's form (three of four layers gated delta nets) and in Qwen3's, and learn to
sort three digits. A line says for each: mean reward of the first and last five steps, the mismatch of engine and
trainer in the first step, seconds of a step. The hybrid one should learn, with a mismatch no worse than the dense
one's. Needs rlplug-algos, -hybrids and, for vLLM, -rollout-vllm.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from gpu_check import QUICKSTART, run
from hybrids import SHAPES
from transformers import AutoConfig

VOCABULARY: Final = {"vocab_size": 12, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}
DENSE: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def write_model(folder: Path, shape: dict[str, Any], is_hybrid: bool) -> Path:
    """Write the quickstart's model folder with another configuration; return it."""
    shutil.copytree("examples/quickstart/model", folder, dirs_exist_ok=True)
    if is_hybrid:
        config = AutoConfig.for_model("qwen3_5_text", **shape | VOCABULARY)
        config.architectures = ["Qwen3_5ForCausalLM"]
    else:
        same = {name: shape[name] for name in (*DENSE, "head_dim", "tie_word_embeddings") if name in shape}
        config = AutoConfig.for_model("qwen3", **same | VOCABULARY)
        config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--rollout", default="VLLMRollout")
    parser.add_argument("--policies", nargs="+", choices=("hybrid", "dense"), default=["hybrid", "dense"])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", default="3e-5")
    parser.add_argument("--out", type=Path, required=True, help="folder of models, logs and metrics")
    parser.add_argument("rlplug", nargs="*", help="after --: options of rlplug fit, for both")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    has_failed = False
    for name in options.policies:
        is_hybrid = name == "hybrid"
        model = write_model(options.out / f"{name}-model", SHAPES[options.shape], is_hybrid)
        arguments = [*QUICKSTART, "--model.policy.path", str(model), "--model.policy.init", "random"]
        arguments += ["--model.trainer", "HybridTrainer"] if is_hybrid else []
        if torch.cuda.is_available():
            arguments += ["--model.policy.dtype", "bfloat16"]
        else:
            arguments += ["--trainer.accelerator", "cpu"]
        arguments += ["--model.rollout", options.rollout, "--model.optimizer.init_args.lr", options.lr]
        arguments += ["--model.num_steps", str(options.steps), "--run.export_policy", "false"]
        arguments += ["--checkpoint.every_n_steps", "1000"]
        summary = run(name, [*arguments, *options.rlplug], options.out)
        has_failed |= "exit code" in summary
        print(json.dumps(summary), flush=True)
    raise SystemExit(has_failed)


if __name__ == "__main__":
    main()
