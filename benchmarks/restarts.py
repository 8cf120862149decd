"""Starts a rollout engine several times in one process, as a run does after an engine's fault, and says what is left.

    python benchmarks/restarts.py --engine vllm --eager
    python benchmarks/restarts.py --engine vllm --shape tiny --sequences 8 --new 8 --ends working asleep

Each time it starts, takes weights, generates the same completions greedily, and is closed: ``working``, or ``asleep``,
where closing has less to free. What a class claims of ``restart`` is not asked. A line says what the start took, how
many completions are those of the first start, and the memory of the GPU that is still taken after ``close``. With
``--release`` all that is left of a vLLM is dropped after ``close``, and its allocators are kept: vLLM 0.26 drops these
in its shutdown, while the KV cache may still be in their memory.
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
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / GIB


def run_once(
    engine: Any, options: argparse.Namespace, folder: Path, end: str, device: torch.device
) -> tuple[float, list[list[int]]]:
    """Start ``engine``, sync, generate, and close it; return the seconds of the start, and the tokens."""
    spec = make_spec(folder, in_fp8=False)
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with device:
        policy: Any = AutoModelForCausalLM.from_config(config, dtype=spec.dtype)
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
        allocators = vllm_allocators() if options.release else []
        with life.calls("close"):
            engine.close()
        if options.release:
            release(engine, allocators)
    return life.seconds["start"], [completion.token_ids.tolist() for completion in completions]


KEPT: list[Any] = []
"""Allocators of engines that were closed."""


def vllm_allocators() -> list[Any]:
    """Return the allocators of the running vLLM, which memory of its pools is freed with."""
    from vllm.device_allocator.cumem import CuMemAllocator

    instance = CuMemAllocator.instance
    return [] if instance is None else [allocator for _, allocator in instance.allocator_and_pools.values()]


def release(engine: Any, allocators: list[Any]) -> None:
    """Drop what refers to a closed vLLM, and give its memory back."""
    KEPT.extend(allocators)
    engine._requests = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
    parser.add_argument("--release", action="store_true", help="drop what is left of a vLLM that was closed")
    parser.add_argument("--options", type=json.loads, default={}, help="options of the plugin's engine, as JSON")
    options = parser.parse_args()
    options.longest, options.smallest, options.tensor_parallel, options.engine_args = None, 1, 1, {}
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    folder = make_folder(options.shape, Path(tempfile.mkdtemp()))
    engine = make_engine(options)
    first, has_failed, before = None, False, taken_gib(device)
    for number, end in enumerate(options.ends, start=1):
        row: dict[str, Any] = {"start": number, "ends": end}
        try:
            seconds, tokens = run_once(engine, options, folder, end, device)
            first = first or tokens
            num_same = sum(mine == other for mine, other in zip(tokens, first, strict=True))
            row |= {"seconds": round(seconds, 1), "same completions": f"{num_same} of {len(first)}"}
        except Exception as problem:  # noqa: BLE001 - its line says so, and another start may work
            traceback.print_exc()
            row["failed"] = f"{type(problem).__name__}: {problem}"
        has_failed |= "failed" in row
        row["left GiB"] = round(taken_gib(device) - before, 2)
        print(json.dumps(row), flush=True)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
