"""Compares the two weight syncs of ``model.lora.sync``: whole weights with adapters merged, and adapters alone.

``python benchmarks/lora_serving.py --shape qwen3-1.7b --out lora.jsonl`` starts vLLM twice, one after the other, each
in a process of its own beside the same policy: bfloat16 weights that are frozen and float32 adapters on all linear
layers of its blocks. For each it measures start, the first sync and the later ones, what vLLM's logprobs differ from
the policy's, tokens per second at each number of sequences, and a cycle of sleep, wake and sync. Weights are random:
only shapes matter. Each measure is one line of JSON; the last ones compare the two.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from fp8_work import mismatch
from rollout_work import Record, make_engine, make_folder, make_requests, make_spec, timed
from shapes import SHAPES
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rlplug.interfaces import AdapterWeights, Placement
from rlplug.rollout.engine_states import EngineStateMachine
from rlplug.types import GIB, SamplingParams
from rlplug.weight_sync.buckets import policy_buckets
from rlplug.weight_sync.hf_names import adapter_modules, attach_adapters
from rlplug.weight_sync.low_rank import Adapters, LowRankUpdate

SIDES: Final = ("merged", "adapters")
SCALE: Final = 2.0
"""alpha / rank, as model.lora has it by default."""
UP_STD: Final = 2e-3
"""Standard deviation of B: updates are then about 1% of the weights, as after some hundred steps."""
MISMATCH_TOKENS: Final = 64


def adapted_policy(folder: Path, rank: int, device: torch.device) -> nn.Module:
    """Return a policy of random weights with adapters beside its linear layers, which its passes add."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.to_empty(device=device).tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)  # its buffers came without values
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.fill_(1) if parameter.dim() == 1 else parameter.normal_(std=0.02)
    plain_names = {name: name for name, _ in model.named_parameters()}
    updates = {}
    for name, layer in model.model.layers.named_modules():
        if isinstance(layer, nn.Linear):
            down = nn.Linear(layer.in_features, rank, bias=False, device=device)
            up = nn.Linear(rank, layer.out_features, bias=False, device=device)
            nn.init.normal_(up.weight, std=UP_STD)
            updates[f"model.layers.{name}.weight"] = update = LowRankUpdate(down, up, SCALE)
            layer.register_forward_hook(lambda _, inputs, output, update=update: output + added(update, inputs[0]))
    attach_adapters(model, Adapters(updates, plain_names))
    return model  # type: ignore[no-any-return]


def added(update: LowRankUpdate, inputs: torch.Tensor) -> torch.Tensor:
    """Return what an adapter adds to its layer's output, in the dtype of ``inputs``, as a pass of the trainer does."""
    down, up = update.down.weight.to(inputs.dtype), update.up.weight.to(inputs.dtype)
    return inputs @ down.T @ up.T * update.scale


class Side:
    """One engine and the policy beside it, and the engine's calls as a step makes them."""

    def __init__(self, arguments: argparse.Namespace, record: Record) -> None:
        self.arguments, self.record = arguments, record
        device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
        folder = make_folder(arguments.shape, Path(tempfile.mkdtemp()))
        self.policy: Any = adapted_policy(folder, arguments.rank, device)
        self.spec = make_spec(folder, in_fp8=False)
        if arguments.side == "adapters":
            modules = tuple(adapter_modules(self.policy).values())
            adapters = AdapterWeights(arguments.rank, SCALE * arguments.rank, modules)
            self.spec = dataclasses.replace(self.spec, adapters=adapters)
        self.engine = make_engine(arguments)
        self.life = EngineStateMachine(type(self.engine).__name__, device)
        self.placement = Placement(device, 0, 1)
        self.requests = make_requests(arguments, self.policy.config.vocab_size)
        self.version = 0

    def measure(self) -> None:
        """Make all measurements of this side."""
        with self.life.calls("start"):
            self.engine.start(self.spec, self.placement)
        self.record.say("start", seconds=self.life.seconds["start"])
        try:
            first = self.sync()
            later = [self.sync() for _ in range(self.arguments.repeats + 1)]
            self.record.say(
                "sync",
                first_s=first.seconds,
                first_mib=first.num_bytes / (1 << 20),
                median_s=statistics.median(report.seconds for report in later[1:]),
                all_s=[round(report.seconds, 4) for report in later],
                mib=later[-1].num_bytes / (1 << 20),
            )
            self.record.say("mismatch", **self.mismatch())
            for number in sorted(self.arguments.batches):
                speed = timed(partial(self.generate, number), self.arguments.repeats)
                self.record.say(f"generate {number}", **speed)
            if self.engine.capabilities.sleep:
                self.record.say("cycle", **self.cycle())
                self.record.say("mismatch after sleep", **self.mismatch())
        finally:
            self.engine.close()

    @torch.no_grad()
    def sync(self) -> Any:
        """Change the adapters, as an update does, and send them."""
        for update in self.policy.rlplug_adapters.updates.values():
            update.up.weight.add_(torch.randn_like(update.up.weight), alpha=UP_STD / 10)
        buckets = policy_buckets(self.policy, self.spec, 1 << 30, has_frozen=self.version > 0)
        self.version += 1
        with self.life.calls("update_weights"):
            return self.engine.update_weights(buckets, self.version)

    def generate(self, number: int) -> int:
        """Return the tokens of ``number`` completions."""
        with self.life.calls("generate"):
            completions = self.engine.generate(self.requests[:number], SamplingParams(self.arguments.new))
        return sum(len(completion.token_ids) for completion in completions)

    def mismatch(self) -> dict[str, float]:
        """Compare the engine's logprobs with the policy's, of a few short completions."""
        requests = [
            dataclasses.replace(request, max_new_tokens=min(MISMATCH_TOKENS, self.arguments.new))
            for request in self.requests[: self.arguments.mismatch]
        ]
        with self.life.calls("generate"):
            completions = self.engine.generate(requests, SamplingParams(MISMATCH_TOKENS))
        return mismatch(self.policy, requests, completions)

    def cycle(self) -> dict[str, float]:
        """Let the engine sleep and wake, and return what each part takes, in seconds."""
        with self.life.calls("sleep"):
            self.engine.sleep()
        freed_gib = self.life.freed_bytes / GIB
        with self.life.calls("wake_weights"):
            self.engine.wake("weights")
        report = self.sync()
        with self.life.calls("wake_kv_cache"):
            self.engine.wake("kv_cache")
        seconds = {name: self.life.seconds[name] for name in ("sleep", "wake_weights", "wake_kv_cache")}  # type: ignore[index]
        return {**seconds, "sync": report.seconds, "freed_gib": freed_gib}


def compare(lines: Sequence[dict[str, Any]], record: Record) -> None:
    """Say how the sides differ, where both were measured."""
    merged, adapters = ({line["measure"]: line for line in lines if line["phase"] == side} for side in SIDES)
    for measure in [measure for measure in merged if measure in adapters]:
        one, other = merged[measure], adapters[measure]
        if measure == "sync":
            record.say("bytes of a sync, merged over adapters", ratio=one["mib"] / other["mib"])
            record.say("seconds of a sync, merged over adapters", ratio=one["median_s"] / other["median_s"])
        if measure.startswith("generate"):
            ratio = one["tokens_per_s"] / other["tokens_per_s"]
            record.say(f"{measure}: seconds a token, adapters over merged", ratio=ratio)
        if measure == "mismatch":
            record.say("mean mismatch, merged over adapters", ratio=one["mean"] / other["mean"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to which measures are appended")
    parser.add_argument("--side", choices=SIDES, help="measure this side alone, in this process")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256], help="numbers of sequences at once")
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--new", type=int, default=256, help="tokens of a completion")
    parser.add_argument("--share", type=float, default=0.4, help="gpu_memory_utilization")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--graph-sizes", type=int, nargs="+", help="batch sizes of CUDA graphs; by default --batches")
    parser.add_argument("--options", type=json.loads, default={}, help="options of VLLMRollout, as JSON")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="vLLM's own arguments, as JSON")
    parser.add_argument("--mismatch", type=int, default=16, help="completions whose logprobs the policy computes too")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    for number in arguments.batches:
        if number % arguments.group:
            parser.error(f"--batches {number} is no multiple of --group {arguments.group}")
    return arguments


def main() -> None:
    arguments = parse()
    record = Record("vllm", arguments.side or "both", arguments.out, is_first=True)
    if arguments.side is not None:
        graphs = None if arguments.eager or arguments.device == "cpu" else arguments.graph_sizes or arguments.batches
        of_workload = {"engine": "vllm", "sequences": max(arguments.batches), "longest": None, "smallest": 0}
        of_engine = {"tensor_parallel": 1, "graph_sizes": graphs}
        Side(argparse.Namespace(**vars(arguments) | of_workload | of_engine), record).measure()
        return
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.unlink(missing_ok=True)
    gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else None
    record.say("arguments", **vars(arguments), torch=torch.__version__, gpu=gpu)
    codes = [subprocess.run([sys.executable, *sys.argv, "--side", side], check=False).returncode for side in SIDES]
    compare([json.loads(line) for line in arguments.out.read_text().splitlines()], record)
    if any(codes):
        raise SystemExit(f"the sides {SIDES} ended with {codes}")


if __name__ == "__main__":
    main()
