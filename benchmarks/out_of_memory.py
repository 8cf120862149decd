"""Provoke out-of-memory errors on a real GPU, each in a run of its own, and print what the run says of them.

    python benchmarks/out_of_memory.py --out FOLDER

No model is needed: weights are drawn with a seed, from a configuration that is written here (12 layers, 32,768 tokens
of vocabulary, of which random weights hardly ever choose the end). A run that runs out must end with status 1, one
message of at most a screen and a file with its traceback; `fits`, `mended` (what the message of `update` names) and
`neighbour` (beside a process that holds `--held` GiB) must end with 0.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOLD = "import sys, time, torch; x = torch.empty(int(float(sys.argv[1]) * 2**30), dtype=torch.uint8, device='cuda'); "
HOLD += "torch.cuda.synchronize(); print('held', flush=True); time.sleep(600)"


def write_model(folder: Path, layers: int, hidden: int) -> Path:
    """Write the configuration of a policy whose weights are to be drawn, and a tokenizer."""
    from transformers import Qwen3Config

    shutil.copytree(ROOT / "examples/quickstart/model", folder, dirs_exist_ok=True)
    Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128,
        head_dim=128,
        intermediate_size=3 * hidden,
        vocab_size=32768,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)
    return folder


def fit(name: str, options: argparse.Namespace, model: Path, *more: str) -> str:
    """Run ``rlplug fit`` and print its last lines; return all of them."""
    command = [sys.executable, "-m", "rlplug", "fit", "--config", "configs/quickstart.yaml"]
    command += ["--model.policy.path", str(model), "--trainer.accelerator", options.accelerator]
    command += ["--model.policy.dtype", "bfloat16", "--model.num_steps", "2"]
    command += ["--model.validation.at_start", "false", "--model.validation.every_n_steps", "null"]
    command += ["--model.batch.prompts_per_step", str(options.prompts), "--model.batch.group_size", "16"]
    command += ["--model.sampling.max_new_tokens", str(options.completion), "--run.dir", str(options.out / name)]
    command += ["--model.rollout", "HFRollout", "--model.rollout.max_batch_size", "1024"]
    command += ["--model.memory.on_shortfall", "warn", "--run.export_policy", "false", *more]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=options.limit)
    text = done.stdout + done.stderr
    (options.out / f"{name}.log").write_text(text)
    lines = text.rstrip().splitlines()
    seconds = time.perf_counter() - began
    print(f"\n## {name}: status {done.returncode}, {len(lines)} lines, {seconds:.0f} s: {' '.join(more)}", flush=True)
    print("\n".join(line[:170] for line in lines[-options.lines :]), flush=True)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--completion", type=int, default=160)
    parser.add_argument("--held", type=float, default=0.0, help="GiB that another process takes, in one more run")
    parser.add_argument("--accelerator", default="gpu")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of one run")
    parser.add_argument("--lines", type=int, default=34)
    parser.add_argument("--runs", nargs="+", default=["fits", "update", "mended", "recorded", "neighbour"])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model = write_model(options.out / "model", options.layers, options.hidden)
    large = ("--model.batch.max_tokens_per_gpu", "1000000")
    if "fits" in options.runs:
        fit("fits", options, model, "--model.batch.max_tokens_per_gpu", "8192")
    said = fit("update", options, model, *large) if "update" in options.runs else ""
    named = re.search(r"Smallest change that fits.*?max_tokens_per_gpu: (\d+)", said)
    if "mended" in options.runs and named is not None:
        fit("mended", options, model, "--model.batch.max_tokens_per_gpu", named[1])
    if "recorded" in options.runs:
        fit("recorded", options, model, *large, "--profile.steps", "1", "--profile.tool", "memory")
        print(*sorted(str(path) for path in options.out.glob("recorded/*/profile/*")), sep="\n")
    if "neighbour" in options.runs and options.held:
        neighbour = subprocess.Popen([sys.executable, "-c", HOLD, str(options.held)], stdout=subprocess.PIPE, text=True)
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == "held\n"
        try:
            fit("neighbour", options, model, "--model.batch.max_tokens_per_gpu", "32768")
        finally:
            neighbour.kill()


if __name__ == "__main__":
    main()
