"""Starts a rollout engine several times in one process, as a run does after an engine's fault, and says what is left.

    python benchmarks/restarts.py --engine vllm --eager
    python benchmarks/restarts.py --engine vllm --shape tiny --sequences 8 --new 8 --ends working asleep

Each time it starts, takes weights, generates the same completions greedily, and is closed: ``working``, or ``asleep``,
where closing has less to free. What a class claims of ``restart`` is not asked. A line says what the start took, how
many completions are those of the first start, and the memory of the GPU that is still taken after ``close``.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from rollout_work import ENGINES, make_engine, make_folder, make_requests, make_spec
from shapes import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM

from rlplug.interfaces import Placement
from rlplug.rollout.engine_states import EngineStateMachine
from rlplug.types import GIB, SamplingParams
from rlplug.weight_sync.buckets import weight_buckets


def taken_gib(device: torch.device) -> float:
    """Return the memory of the GPU that is taken, by anything, in GiB."""
    if device.type != "cuda":
        return float("nan")
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / GIB


def run_once(options: argparse.Namespace, folder: Path, end: str, device: torch.device) -> dict[str, Any]:
    """Start, sync, generate, and close; return the tokens and what it took."""
    spec = make_spec(folder, in_fp8=False)
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with device:
        policy: Any = AutoModelForCausalLM.from_config(config, dtype=spec.dtype)
    engine = make_engine(options)
    life = EngineStateMachine(type(engine).__name__, device)
    try:
        with life.calls("start"):
            engine.start(spec, Placement(device, 0, 1))
        with life.calls("update_weights"):
            engine.update_weights(weight_buckets(policy, spec.dtype, 1 << 30), 0)
        with life.calls("generate"):
            completions = engine.generate(
                make_requests(options, config.vocab_size), SamplingParams(options.new, temperature=0.0)
            )
        if end == "asleep":
            with life.calls("sleep"):
                engine.sleep()
    finally:
        with life.calls("close"):
            engine.close()
    return {"start s": life.seconds["start"], "tokens": [completion.token_ids for completion in completions]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b")
    parser.add_argument(
        "--ends", nargs="+", choices=("working", "asleep"), default=["working", "working", "asleep", "working"]
    )
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--graph-sizes", type=int, nargs="+", help="batch sizes of CUDA graphs")
    parser.add_argument("--options", type=json.loads, default={}, help="options of the plugin's engine, as JSON")
    options = parser.parse_args()
    options.longest, options.smallest, options.tensor_parallel, options.engine_args = None, 1, 1, {}
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    folder = make_folder(options.shape, Path(tempfile.mkdtemp()))
    first, has_failed, before = None, False, taken_gib(device)
    for number, end in enumerate(options.ends, start=1):
        row: dict[str, Any] = {"start": number, "ends": end}
        try:
            result = run_once(options, folder, end, device)
            first = first or result["tokens"]
            num_same = sum(mine == other for mine, other in zip(result["tokens"], first, strict=True))
            row |= {"seconds": round(result["start s"], 1), "same completions": f"{num_same} of {len(first)}"}
        except Exception as problem:  # noqa: BLE001 - its line says so, and another start may work
            traceback.print_exc()
            row["failed"] = f"{type(problem).__name__}: {problem}"
        has_failed |= "failed" in row
        row["left GiB"] = round(taken_gib(device) - before, 2)
        print(json.dumps(row), flush=True)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
