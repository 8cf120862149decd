"""Measures a rollout engine: tokens per second beside the bare engine, sleep and wake, and the weight sync.

``torchrun --nproc-per-node 1 benchmarks/rollout.py --engine sglang --phases bare plugin --out rollout.jsonl`` needs a
GPU per process, and the engine in this environment. ``bare`` runs vLLM's ``LLM`` or SGLang's ``Engine`` on the same
requests with the same arguments, in a process of its own. ``plugin`` runs the plugin's engine beside an FSDP2-sharded
policy of the same shape in float32. Weights are random: only shapes matter. Each measure is one line of JSON.

``--table FILE...`` prints what such files hold, of one engine or of several, as Markdown tables.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fp8_work import mismatch
from rollout_sync import described, other_ways
from rollout_table import print_tables
from rollout_work import (
    ENGINES,
    PACKAGES,
    Record,
    longest_completion,
    make_engine,
    make_folder,
    make_requests,
    make_spec,
    timed,
)
from shapes import SHAPES
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from rlplug.interfaces import Placement
from rlplug.rollout.engine_states import EngineStateMachine
from rlplug.types import GIB, SamplingParams
from rlplug.weight_sync.buckets import weight_buckets

BARE_DEADLINE_S = 3600.0
MISMATCH_TOKENS = 128
REPORTED = 1
"""Exit code of a bare side that has written why it failed."""
RANK_VARIABLES = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "PYTORCH_CUDA_ALLOC")
"""How variables of the environment begin that a bare engine must not see: it is no rank of a trainer."""


def bare(arguments: argparse.Namespace, folder: Path, record: Record) -> bool:
    """Run ``rollout_bare.py`` in a process of its own; return whether it succeeded."""
    rank, local = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(RANK_VARIABLES)}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and arguments.device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local]
    described_run = json.dumps(vars(arguments) | {"folder": str(folder), "rank": rank}, default=str)
    script = Path(__file__).with_name("rollout_bare.py")
    process = subprocess.Popen([sys.executable, script, described_run], env=environment, start_new_session=True)
    try:
        code = process.wait(BARE_DEADLINE_S)
        if code not in (0, REPORTED):
            record.say("failed", reason=f"the process ended with exit code {code}: see its log")
        return code == 0
    except subprocess.TimeoutExpired:
        record.say("failed", reason=f"it took longer than {BARE_DEADLINE_S:g} s")
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing is left of the engine
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def sharded_policy(folder: Path, device: torch.device) -> nn.Module:
    """Return a policy of random float32 weights, sharded over all processes as the strategy shards it; norms are 1."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its buffers came without values
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            if parameter.dim() == 1:
                local.fill_(1)
            else:
                local.normal_(std=0.02)
    return model  # type: ignore[no-any-return]


class PluginRun:
    """Makes an engine's calls as a step does, and writes what each takes."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, device: torch.device, record: Record) -> None:
        self.arguments, self.record = arguments, record
        self.spec = make_spec(folder, arguments.fp8, not arguments.float32_scales)
        self.policy: Any = sharded_policy(folder, device)
        self.engine = make_engine(arguments)
        self.engine.check(self.spec)
        self.life = EngineStateMachine(type(self.engine).__name__, device)
        self.placement = Placement(device, dist.get_rank(), dist.get_world_size())
        self.requests = make_requests(arguments, self.policy.config.vocab_size)
        self.version = 0

    def measure(self) -> None:
        """Start, sync and generate; then sleep, wake, sync and generate again, as often as ``--cycles`` says."""
        with self.life.calls("start"):
            self.engine.start(self.spec, self.placement)
        try:
            self.record.say("start", seconds=self.life.seconds["start"])
            self._measure_syncs()
            if self.arguments.mismatch:
                self._measure_mismatch()
            speed = timed(self._generate, self.arguments.repeats)
            self.record.say("generate", **speed, stats=self.engine.stats(), advice=self.engine.advice())
            for _ in range(self.arguments.cycles if self.engine.capabilities.sleep else 0):
                self._measure_cycle()
        finally:
            self.engine.close()

    def _measure_syncs(self) -> None:
        reports = []
        for _ in range(self.arguments.repeats + 1):
            dist.barrier()
            reports.append(self._sync())
        seconds = statistics.median(report.seconds for report in reports[1:])
        self.record.say(
            "sync",
            median=seconds,
            all=[round(report.seconds, 4) for report in reports],
            gib=reports[0].num_bytes / GIB,
            gb_per_s=reports[0].num_bytes / seconds / 1e9,
            buckets=reports[0].num_buckets,
        )
        for name, way_seconds in other_ways(self.engine, self.policy, self.spec, self.arguments).items():
            self.record.say(f"sync: {name}", **described(way_seconds))

    def _measure_mismatch(self) -> None:
        """Compare the engine's logprobs with the trainer's, of a few short completions of random weights."""
        requests = [
            dataclasses.replace(request, max_new_tokens=MISMATCH_TOKENS)
            for request in self.requests[: self.arguments.mismatch]
        ]
        with self.life.calls("generate"):
            completions = self.engine.generate(requests, SamplingParams(MISMATCH_TOKENS))
        self.record.say("mismatch", **mismatch(self.policy, requests, completions))

    def _measure_cycle(self) -> None:
        with self.life.calls("sleep"):
            self.engine.sleep()
        freed_gib = self.life.freed_bytes / GIB
        with self.life.calls("wake_weights"):
            self.engine.wake("weights")
        report = self._sync()
        with self.life.calls("wake_kv_cache"):
            self.engine.wake("kv_cache")
        num_tokens = self._generate()
        self.record.say(
            "cycle",
            **{name: self.life.seconds[name] for name in ("sleep", "wake_weights", "wake_kv_cache")},  # type: ignore[index]
            sync=report.seconds,
            freed_gib=freed_gib,
            tokens_per_s=num_tokens / self.life.seconds["generate"],
            stats=self.engine.stats(),
        )

    def _sync(self) -> Any:
        self.version += 1
        with self.life.calls("update_weights"):
            buckets = weight_buckets(self.policy, self.spec.dtype, self.arguments.bucket_mib << 20, self.spec.fp8)
            return self.engine.update_weights(buckets, self.version)

    def _generate(self) -> int:
        with self.life.calls("generate"):
            completions = self.engine.generate(self.requests, SamplingParams(longest_completion(self.arguments)))
        return sum(len(completion.token_ids) for completion in completions)


def about_here(engine: str) -> dict[str, Any]:
    """Return versions and device, for the first line of a run."""
    installed = {name: _version(name) for name in (*PACKAGES[engine], "transformers", "rlplug")}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "torch": torch.__version__,
        "versions": {name: version for name, version in installed.items() if version is not None},
        "gpu": gpu,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="print these files, and run nothing")
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--phases", nargs="+", choices=("bare", "plugin"), default=["plugin"])
    parser.add_argument("--out", type=Path, help="file to which measures are appended, beside standard output")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default="llama-1.7b")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--new", type=int, default=512, help="tokens of a completion, on average")
    parser.add_argument("--longest", type=int, help="tokens; completions are then log-normal, not all of one length")
    parser.add_argument("--smallest", type=int, default=64, help="tokens of the shortest, with --longest")
    parser.add_argument("--seeded", action="store_true", help="bare vLLM also with each request's seed")
    parser.add_argument("--profile", type=int, default=0, metavar="ROWS", help="bare vLLM's costliest kernels")
    parser.add_argument(
        "--share", type=float, default=0.5, help="gpu_memory_utilization; mem_fraction_static, of what is free at start"
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--graph-sizes", type=int, nargs="+", help="batch sizes of CUDA graphs")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--options", type=json.loads, default={}, help="options of the plugin's engine, as JSON")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="vLLM's or SGLang's own arguments, as JSON")
    parser.add_argument("--bare-args", type=json.loads, default={}, help="the same, of the bare engine alone")
    parser.add_argument("--fp8", action="store_true", help="weights travel in FP8, and the engine calculates in it")
    parser.add_argument("--float32-scales", action="store_true", help="with --fp8: scales are no powers of two")
    parser.add_argument("--mismatch", type=int, default=0, help="completions whose logprobs the trainer computes too")
    parser.add_argument("--bucket-mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=2, help="of sleep, wake, sync and rollout")
    arguments = parser.parse_args()
    if arguments.table is None:
        check(parser, arguments)
    return arguments


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse what would fail late, or would be ignored."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.sequences % arguments.group:
        parser.error(f"--sequences {arguments.sequences} is no multiple of --group {arguments.group}")
    if "plugin" in arguments.phases and "RANK" not in os.environ:
        parser.error("--phases plugin: start it with torchrun --nproc-per-node 1 (or more)")
    if arguments.engine == "hf" and (arguments.engine_args or arguments.eager or "bare" in arguments.phases):
        parser.error("--engine hf has no bare side, and takes neither --engine-args nor --eager")
    if arguments.engine == "sglang" and arguments.device == "cpu" and "plugin" in arguments.phases:
        parser.error("--engine sglang --phases plugin needs a GPU")
    if "bare" in arguments.phases and arguments.tensor_parallel > 1 and size > 1:
        parser.error("--phases bare --tensor-parallel: one process starts the engine on all its GPUs (nproc 1)")
    if arguments.profile and (arguments.engine != "vllm" or "bare" not in arguments.phases):
        parser.error("--profile is of bare vLLM: give --engine vllm --phases bare")
    if arguments.eager and arguments.graph_sizes is not None:
        parser.error("--eager has no CUDA graphs: leave --graph-sizes out")
    if arguments.longest is not None and arguments.longest <= arguments.new:
        parser.error(f"--longest {arguments.longest} must be above --new {arguments.new}, the mean")


def main() -> None:
    arguments = parse()
    if arguments.table is not None:
        print_tables(arguments.table)
        return
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first and arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    record = Record(arguments.engine, "plugin", arguments.out, is_first)
    record.say("arguments", **vars(arguments) | about_here(arguments.engine))
    folder = make_folder(arguments.shape, Path(tempfile.mkdtemp()))
    has_failed = "bare" in arguments.phases and not bare(arguments, folder, dataclasses.replace(record, phase="bare"))
    if "plugin" in arguments.phases:
        device = (
            torch.device("cuda", int(os.environ["LOCAL_RANK"])) if arguments.device == "cuda" else torch.device("cpu")
        )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        try:
            PluginRun(arguments, folder, device, record).measure()
        except Exception as problem:
            record.say("failed", reason=f"{type(problem).__name__}: {problem}")
            raise
        dist.destroy_process_group()
    if has_failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
