"""Measures what a vLLM server hands over: tokens per second, and the CPU time that each of its processes spends on one.

``python benchmarks/server_delivery.py --shape llama-1.7b --out delivery.jsonl`` starts a server for each number of API
processes in ``--api-servers``, on the first GPU or on the CPU, and sends it requests as an asynchronous rollout does:
their tokens are streamed. Weights are random, and none are sent. Each measure is one line of JSON; a table ends it.

An engine that generates faster than its API processes hand over, or than this process reads, waits for neither: tokens
pile up in between, and a policy trains on them late.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from rlplug_engines.colocated.stats import EngineStats
from rlplug_engines.servers import BackendContext, PendingRequest
from rlplug_engines.servers.http_client import HTTPClient
from rlplug_engines.servers.processes import ServerProcesses, wait_until_healthy
from rlplug_engines.servers.requests import ServerRequests
from rollout_work import Record, engine_options, longest_completion, make_folder, make_requests, make_spec
from shapes import SHAPES
from transformers import AutoConfig

from rlplug.interfaces import PolicySpec
from rlplug.types import Request, SamplingParams

DEADLINE_S: Final = 900.0
ENGINE_PROCESSES: Final = ("EngineCore", "Worker")
"""What the command line of an engine's process has in it."""
COLUMNS: Final = {
    "api_servers": "API processes",
    "tokens_per_s": "tokens/s handed over",
    "api_us": "all API processes, us of CPU time a token",
    "busiest_us": "the busiest of them, us a token",
    "engine_us": "engine, us a token",
    "client_us": "this process, us a token",
}


class RunningServer:
    """A vLLM server, and what sends requests to it, without the group that weights come through."""

    def __init__(self, arguments: argparse.Namespace, spec: PolicySpec, device: torch.device, api_servers: int) -> None:
        from rlplug_rollout_vllm.options import VLLMServerOptions
        from rlplug_rollout_vllm.server import VLLMBackend

        options = VLLMServerOptions(**engine_options(arguments), api_server_count=api_servers)
        backend = VLLMBackend(options, BackendContext(spec, device, is_launched=True))
        labels = self.labels = backend.labels
        seen = None if device.type == "cpu" else "0"
        self.processes = ServerProcesses(labels.engine, backend.launch, [seen], labels.noise)
        self.client = HTTPClient(self.processes.keys, "the server's environment", labels.server_key)
        urls = self.processes.urls
        wait_until_healthy(labels.engine, self.client, urls, DEADLINE_S, self.processes)
        self.requests = ServerRequests(backend, self.client, urls, 0, DEADLINE_S, EngineStats(0, 0))

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> int:
        """Return how many tokens came, streamed."""
        pending = [
            PendingRequest(request, sampling, request.limit(sampling), version=0, is_streamed=True)
            for request in requests
        ]
        self.requests.submit(pending)
        num_tokens = num_completions = 0
        deadline = time.monotonic() + DEADLINE_S
        while num_completions < len(pending):
            completions = self.requests.collect(1.0)
            num_completions += len(completions)
            num_tokens += sum(len(completion.token_ids) for completion in completions)
            if time.monotonic() > deadline:
                raise SystemExit(f"{num_completions} of {len(pending)} completions came within {DEADLINE_S:g} s")
        return num_tokens

    def close(self) -> None:
        self.client.close()
        self.processes.close()


def cpu_seconds(api_processes: Sequence[str]) -> Counter[tuple[str, int]]:
    """Return the CPU time so far of this process and of the server's, by part and process."""
    names = {"engine_us": ENGINE_PROCESSES, "api_us": api_processes}
    own = psutil.Process()
    found: Counter[tuple[str, int]] = Counter({("client_us", own.pid): sum(own.cpu_times()[:2])})
    for process in own.children(recursive=True):
        command = " ".join(process.cmdline())
        if part := next((part for part, some in names.items() if any(name in command for name in some)), None):
            found[part, process.pid] = sum(process.cpu_times()[:2])
    return found


def measure(arguments: argparse.Namespace, server: RunningServer, requests: Sequence[Request]) -> dict[str, Any]:
    """Return tokens per second, and each part's CPU time for a token in microseconds, of the fastest repeat."""
    sampling, best = SamplingParams(longest_completion(arguments)), None
    for _ in range(arguments.repeats + 1):  # the first of them is not counted: its shapes are new
        before, began = cpu_seconds(server.labels.api_processes), time.perf_counter()
        num_tokens = server.generate(requests, sampling)
        seconds = time.perf_counter() - began
        spent = cpu_seconds(server.labels.api_processes) - before
        if best is None or seconds < best["seconds"]:
            by_part: Counter[str] = Counter()
            for (part, _), value in spent.items():
                by_part[part] += 1e6 * value / num_tokens  # type: ignore[assignment]
            busiest = max((value for (part, _), value in spent.items() if part == "api_us"), default=0.0)
            of_parts = {"api_us": 0.0, "engine_us": 0.0} | by_part | {"busiest_us": 1e6 * busiest / num_tokens}
            best = {"seconds": seconds, "tokens": num_tokens, "tokens_per_s": num_tokens / seconds, **of_parts}
    assert best is not None
    return best


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file to which measures are appended, beside standard output")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default="llama-1.7b")
    parser.add_argument("--api-servers", type=int, nargs="+", default=[1, 2, 4], help="numbers of API processes")
    parser.add_argument("--sequences", type=int, default=256, help="requests at once")
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--new", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--share", type=float, default=0.5, help="gpu_memory_utilization")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="vLLM's own, as JSON")
    parser.add_argument("--repeats", type=int, default=2)
    # what rollout_work.py reads besides
    parser.set_defaults(engine="vllm", longest=None, smallest=64, tensor_parallel=1, graph_sizes=None, options={})
    arguments = parser.parse_args()
    if arguments.sequences % arguments.group:
        parser.error(f"--sequences {arguments.sequences} is no multiple of --group {arguments.group}")
    return arguments


def main() -> None:
    arguments = parse()
    record = Record("vllm", "server", arguments.out, is_first=True)
    folder = make_folder(arguments.shape, Path(tempfile.mkdtemp()))
    spec = make_spec(folder, in_fp8=False)
    requests = make_requests(arguments, AutoConfig.from_pretrained(folder).vocab_size)
    rows = []
    for api_servers in arguments.api_servers:
        server = RunningServer(arguments, spec, torch.device(arguments.device), api_servers)
        try:
            found = measure(arguments, server, requests)
        finally:
            server.close()
        record.say("delivery", api_servers=api_servers, **found)
        rows.append({"api_servers": api_servers} | found)
    print("| " + " | ".join(COLUMNS.values()) + " |\n" + "|-" * len(COLUMNS) + "|")
    for row in rows:
        print("| " + " | ".join(f"{row[name]:,.0f}" for name in COLUMNS) + " |")


if __name__ == "__main__":
    main()
