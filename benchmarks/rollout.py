"""Measures vLLM as a rollout engine: tokens per second beside bare vLLM, sleep and wake, and the weight sync.

``torchrun --nproc-per-node 1 benchmarks/rollout.py --shape llama-1.7b`` needs a GPU per process. ``--phases bare`` runs
vLLM's own ``LLM`` on the same requests with the same arguments, ``--phases plugin`` runs ``VLLMRollout`` beside an
FSDP2-sharded policy of the same shape in float32. Weights are random: only shapes matter. One line of JSON a measure.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shapes import completion_lengths, write_config
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from rlplug.interfaces import Placement, PolicySpec
from rlplug.phases import GIB
from rlplug.rollout.buckets import weight_buckets
from rlplug.rollout.lifecycle import Lifecycle
from rlplug.types import Request, SamplingParams


def say(measure: str, **values: Any) -> None:
    """Print one measure, from the first process."""
    if int(os.environ.get("RANK", "0")) == 0:
        rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}
        print(json.dumps({"measure": measure, **rounded}), flush=True)


def make_requests(arguments: argparse.Namespace, vocab_size: int) -> list[Request]:
    """Return requests of random tokens; ``group`` of them share a prompt."""
    generator = torch.Generator().manual_seed(0)
    num_prompts = arguments.sequences // arguments.group
    prompts = torch.randint(3, vocab_size, (num_prompts, arguments.prompt), generator=generator).tolist()
    return [
        Request(f"{index}/{sample}", tuple(prompt), seed=1000 * index + sample)
        for index, prompt in enumerate(prompts)
        for sample in range(arguments.group)
    ]


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that both phases use."""
    return {
        "gpu_memory_utilization": arguments.share,
        "max_model_len": arguments.prompt + (arguments.longest or arguments.new),
        "max_num_seqs": arguments.sequences,
        "tensor_parallel_size": arguments.tensor_parallel,
        "enforce_eager": arguments.eager,
        "kv_cache_gib": arguments.kv_cache_gib,
        "engine_args": arguments.engine_args,
    }


def timed(action: Callable[[], Any], repeats: int) -> list[float]:
    """Return the seconds of each repeat, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def speed(seconds: list[float], num_tokens: int) -> dict[str, Any]:
    """Return the median and the best of repeats."""
    return {
        "tokens_per_s": num_tokens / statistics.median(seconds),
        "best": num_tokens / min(seconds),
        "seconds": [round(value, 3) for value in seconds],
    }


def bare(arguments: argparse.Namespace, spec: PolicySpec, device: torch.device) -> None:
    """Generate with vLLM's own ``LLM`` in this process, without and with a seed of each request.

    With ``--longest`` completions are log-normal and ``--new`` tokens long on average.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from rlplug_rollout_vllm.options import VLLMOptions
    from vllm import LLM
    from vllm import SamplingParams as VLLMSamplingParams

    began = time.perf_counter()
    engine = LLM(**VLLMOptions(**engine_options(arguments)).arguments(spec, device))
    say("bare: start", seconds=time.perf_counter() - began)
    requests = make_requests(arguments, engine.llm_engine.vllm_config.model_config.get_vocab_size())
    prompts: Any = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
    longest = arguments.longest or arguments.new
    lengths = completion_lengths(len(requests), arguments.new, longest > arguments.new, longest, arguments.smallest)
    for seeded in (False, True):
        sampling = [
            VLLMSamplingParams(
                max_tokens=length,
                temperature=1.0,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                seed=request.seed if seeded else None,
            )
            for request, length in zip(requests, lengths, strict=True)
        ]
        seconds = timed(lambda: engine.generate(prompts, sampling, use_tqdm=False), arguments.repeats)  # noqa: B023
        say(f"bare: generate, {'seeded' if seeded else 'unseeded'}", **speed(seconds, sum(lengths)))


def sharded_policy(folder: Path, device: torch.device) -> nn.Module:
    """Return a policy of random float32 weights, sharded over all processes as the strategy shards it."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(std=0.02)
    return model  # type: ignore[no-any-return]


def plugin(arguments: argparse.Namespace, spec: PolicySpec, device: torch.device, folder: Path) -> None:
    """Generate through ``VLLMRollout``; sleep, wake and sync as a step does."""
    from rlplug_rollout_vllm import VLLMRollout
    from rlplug_rollout_vllm import weights as vllm_weights

    policy = sharded_policy(folder, device)
    engine = VLLMRollout(**engine_options(arguments))
    life = Lifecycle("VLLMRollout", device)
    with life.calls("start"):
        engine.start(spec, Placement(device, dist.get_rank(), dist.get_world_size()))
    say("plugin: start", seconds=life.seconds["start"])
    requests = make_requests(arguments, policy.config.vocab_size)
    sampling = SamplingParams(arguments.new)

    def sync() -> None:
        with life.calls("update_weights"):
            report = engine.update_weights(weight_buckets(policy, spec.dtype, arguments.bucket_mib << 20), 1)
        syncs.append(report.seconds)

    syncs: list[float] = []
    for _ in range(arguments.repeats + 1):
        dist.barrier()
        sync()
    num_bytes = sum(parameter.numel() for parameter in policy.parameters()) * spec.dtype.itemsize
    say("plugin: sync", median=statistics.median(syncs[1:]), all=[round(s, 4) for s in syncs], gib=num_bytes / GIB)
    for name, seconds in sync_alternatives(engine, vllm_weights, policy, spec, arguments).items():
        say(f"sync: {name}", median=statistics.median(seconds), all=[round(s, 4) for s in seconds])

    def generate() -> None:
        with life.calls("generate"):
            engine.generate(requests, sampling)

    seconds = timed(generate, arguments.repeats)
    say("plugin: generate", **speed(seconds, len(requests) * arguments.new), stats=engine.stats())
    for _ in range(2 if engine.capabilities.sleep else 0):
        with life.calls("sleep"):
            engine.sleep()
        for part in ("weights", "kv_cache"):
            with life.calls(f"wake_{part}"):  # type: ignore[arg-type]
                engine.wake(part)  # type: ignore[arg-type]
            if part == "weights":
                sync()
        say("plugin: sleep and wake", **life.seconds, freed_gib=life.freed_bytes / GIB, sync=syncs[-1])
    engine.close()


def sync_alternatives(
    engine: Any, vllm_weights: Any, policy: nn.Module, spec: PolicySpec, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Time other ways to the same end: the floor, a call for each parameter, vLLM's layer-wise reload."""

    def one_call_each() -> None:
        for name, parameter in policy.named_parameters():
            full = parameter.full_tensor().to(spec.dtype)  # type: ignore[attr-defined]
            engine._engine.apply_model(functools.partial(load_one, name, full))
            wait(device)

    def layerwise() -> None:
        plain, vllm_weights.is_plain = vllm_weights.is_plain, lambda *_: False
        buckets = weight_buckets(policy, spec.dtype, arguments.bucket_mib << 20)
        vllm_weights.load_weights(engine._model, engine._engine.vllm_config, buckets)
        vllm_weights.is_plain = plain
        wait(device)

    size, device = dist.get_world_size(), next(policy.parameters()).device
    num_elements = sum(parameter.numel() for parameter in policy.parameters())
    share = torch.empty(min(num_elements, 1 << 29) // size, dtype=spec.dtype, device=device)
    full = torch.empty(share.numel() * size, dtype=spec.dtype, device=device)

    def floor() -> None:
        for _ in range(-(-num_elements // full.numel())):
            dist.all_gather_into_tensor(full, share) if size > 1 else full.copy_(share)
        wait(device)

    def gather_alone() -> None:
        for _ in weight_buckets(policy, spec.dtype, arguments.bucket_mib << 20):
            pass
        wait(device)

    ways = {
        "floor, the bytes once": floor,
        "buckets without an engine": gather_alone,
        "a call for each parameter": one_call_each,
        "vLLM's layer-wise reload": layerwise,
    }
    if device.type == "cpu":
        del ways["a call for each parameter"]  # weights are re-packed there, and only the reload unpacks them
    return {name: timed(way, arguments.repeats) for name, way in ways.items()}


def wait(device: torch.device) -> None:
    """Wait for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def load_one(name: str, tensor: torch.Tensor, model: Any) -> None:
    """Load a single weight."""
    with torch.no_grad():
        model.load_weights(iter([(name, tensor)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", nargs="+", choices=("bare", "plugin"), default=["plugin"])
    parser.add_argument("--shape", default="llama-1.7b")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--new", type=int, default=512, help="tokens")
    parser.add_argument("--longest", type=int, help="tokens of the longest completion, with --phases bare")
    parser.add_argument("--smallest", type=int, default=64, help="tokens of the shortest, with --longest")
    parser.add_argument("--share", type=float, default=0.5, help="gpu_memory_utilization")
    parser.add_argument("--kv-cache-gib", type=float)
    parser.add_argument("--engine-args", type=json.loads, default={}, help="arguments of vLLM, as JSON")
    parser.add_argument("--bucket-mib", type=int, default=1024)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", default=None)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    folder = write_config(arguments.shape, Path(tempfile.mkdtemp()))
    longest = AutoConfig.from_pretrained(folder).max_position_embeddings
    spec = PolicySpec(str(folder), torch.bfloat16, eos_token_ids=(), pad_token_id=2, max_context=longest)
    say("arguments", **vars(arguments), torch=torch.__version__)
    if "bare" in arguments.phases:
        bare(arguments, spec, device)
    if "plugin" in arguments.phases:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
        plugin(arguments, spec, device, folder)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
