"""Workloads of both sides of the step benchmark: models, prompts, lengths of completions, and measurements."""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rlplug_plan.model_shape import ModelShape
from shapes import SHAPES, completion_lengths, make_batch, model_flops, write_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from rlplug.distributed.mesh import rank_share

GROUP = 8
NAME, COMPLETIONS, LENGTHS, SPANS = "STEP_WORKLOAD", "STEP_COMPLETIONS", "STEP_LENGTHS", "STEP_SPANS"
"""Environment variables of a run's ranks: its workload, the completions of a step where they are others, kinds of
lengths with the steps of each (``alike:6 drawn:6``), and the folder for what each rank did."""
ALIKE, DRAWN = "alike", "drawn"
"""Lengths of a step's completions: the same ones on each GPU, or drawn over all of them."""


@dataclass(frozen=True)
class Workload:
    """One GRPO step: ``num_completions`` of ``prompt`` tokens and ``completion`` new ones, on average."""

    shape: str
    num_completions: int = 128
    prompt: int = 256
    completion: int = 512
    longest: int = 512
    """Tokens of the longest completion; above ``completion`` lengths are log-normal."""
    smallest: int = 64
    kv_cache_share: float = 0.3
    """``gpu_memory_utilization`` of both sides."""
    lora_rank: int = 0
    """Rank of adapters on all linear layers, with alpha twice that, on both sides; 0 trains all weights."""
    max_tokens: int = 16384
    """rlplug's ``max_tokens_per_gpu``."""
    padded_tokens: int = 40960
    """Of TRL's micro-batch, so that it fits a GPU of 139 GiB without checkpointing; for 1.7B, 32 rows of 768 tokens
    were faster than 16."""

    @property
    def is_heavy_tailed(self) -> bool:
        return self.longest > self.completion

    def lengths(self) -> list[int]:
        """Return the tokens of each completion of a step."""
        return completion_lengths(
            self.num_completions, self.completion, self.is_heavy_tailed, self.longest, self.smallest
        )


WORKLOADS = {
    "fixed": Workload("llama-1.7b"),
    "heavy-tailed": Workload("llama-1.7b", completion=400, longest=2048),
    "large-vocabulary": Workload("qwen3-1.7b"),
    "long": Workload("qwen3-1.7b", completion=1500, longest=8192),
    "thousand": Workload("qwen3-1.7b", num_completions=1024, completion=1000, longest=8192, kv_cache_share=0.45),
    "8b": Workload("qwen3-8b", num_completions=512, kv_cache_share=0.45),
    "8b-lora": Workload(
        *("qwen3-8b", 64, 512, 512, 512), kv_cache_share=0.25, lora_rank=16, max_tokens=8192, padded_tokens=8192
    ),
    "tiny": Workload("tiny", num_completions=16, prompt=16, completion=24, longest=48, smallest=4),
    "tiny-lora": Workload("tiny", num_completions=16, prompt=16, completion=24, longest=24, smallest=4, lora_rank=4),
}


def chosen_workload() -> Workload:
    """Return the workload that the environment names."""
    workload, completions = WORKLOADS[os.environ[NAME]], os.environ.get(COMPLETIONS)
    return replace(workload, num_completions=int(completions)) if completions else workload


def prepare(workload: Workload, folder: Path, with_weights: bool) -> Path:
    """Write configuration, tokenizer and, if asked for, weights below ``folder``, once; return the model's folder.

    The tokenizer has a word for each token, so that a prompt is as long as it says on both sides.
    """
    model_folder = write_config(workload.shape, folder)
    words = {f"w{index}": index for index in range(min(SHAPES[workload.shape]().vocab_size, 49152))}
    words = {"<end>" if index == 2 else word: index for word, index in words.items()}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(
        model_folder
    )
    if with_weights and not (model_folder / "model.safetensors").exists():
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder))
        model.to(torch.bfloat16).save_pretrained(model_folder, max_shard_size="100GB")
    return model_folder


def write_prompts(workload: Workload, folder: Path) -> Path:
    """Write prompts of exactly ``workload.prompt`` tokens; return the file."""
    rng, path = random.Random(0), folder / f"{workload.shape}-{workload.prompt}.jsonl"
    largest = min(SHAPES[workload.shape]().vocab_size, 49152)
    rows = [" ".join(f"w{rng.randrange(100, largest)}" for _ in range(workload.prompt)) for _ in range(256)]
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    return path


def random_reward(completion: Any) -> float:
    """Return a reward that means nothing: weights are random, and nothing is to be learned."""
    return random.random()


def share_stop_rule(workload: Workload) -> None:
    """Let vLLM's engine, in TRL's trainer, stop the i-th request of a step at the i-th length, and never before."""
    from vllm.v1.engine.llm_engine import LLMEngine

    add_request, lengths = LLMEngine.add_request, lengths_of_this_rank(workload)

    def with_length(self: Any, request_id: str, prompt: Any, params: Any, *others: Any, **named: Any) -> Any:
        params = params.clone()
        params.max_tokens, params.ignore_eos, params.stop_token_ids = next(lengths), True, []
        return add_request(self, request_id, prompt, params, *others, **named)

    LLMEngine.add_request = with_length  # type: ignore[method-assign]


def end_trajectories_at(lengths: Iterator[int]) -> None:
    """Let each of rlplug's trajectories end at the next length, in however many requests, and never before.

    What a partial rollout breaks off goes on later and ends where it would have. The policy has no end tokens, since
    engines are checked to end a completion at the first one.
    """
    from rlplug.interfaces import PolicySpec
    from rlplug.rollout.trajectory import Trajectory

    request, length_of, make = Trajectory.request, dict[str, int](), PolicySpec.__init__

    def with_length(self: Trajectory, max_new_tokens: int | None) -> Any:
        if self.key not in length_of:
            length_of[self.key] = next(lengths)
        left = max(1, length_of[self.key] - self.num_after_prompt)
        return request(self, left if max_new_tokens is None else min(left, max_new_tokens))

    def without_end_tokens(self: PolicySpec, *values: Any, **named: Any) -> None:
        make(self, *values, **named)
        object.__setattr__(self, "eos_token_ids", ())

    Trajectory.request = with_length  # type: ignore[method-assign]
    PolicySpec.__init__ = without_end_tokens  # type: ignore[method-assign]


def send_weights_through_the_host() -> None:
    """Let the trainer and a vLLM server that shares its GPU exchange weights over gloo: NCCL refuses one GPU twice."""
    from rlplug_engines.servers.process_group import SendGroup
    from rlplug_rollout_vllm.server import VLLMBackend
    from rlplug_rollout_vllm.weight_transfer import OVER_GLOO

    make = VLLMBackend.__init__

    def with_gloo(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        self._transfer["backend"] = OVER_GLOO

    def group_on_the_host(self: Any, rendezvous: Any, timeout_s: float) -> SendGroup:
        return SendGroup.over_tcp(rendezvous, torch.device("cpu"), timeout_s)

    VLLMBackend.__init__, VLLMBackend.make_group = with_gloo, group_on_the_host  # type: ignore[method-assign]


def lengths_of_this_rank(workload: Workload) -> Iterator[int]:
    """Yield the lengths of this rank's requests, step after step; asked for the first when ranks have their places."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    step = {
        ALIKE: replace(workload, num_completions=workload.num_completions // size).lengths(),
        DRAWN: rank_share(workload.lengths(), rank, size),
    }
    kinds = [kind.partition(":") for kind in os.environ.get(LENGTHS, DRAWN).split()]
    for kind, _, steps in kinds[:-1]:
        yield from itertools.chain.from_iterable(itertools.repeat(step[kind], int(steps)))
    yield from itertools.cycle(step[kinds[-1][0]])


class MemoryWatch(threading.Thread):
    """Notes the most that was taken of the GPU, by anything, in each phase; reads it every 10 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.phase = "start"
        self._peaks: dict[str, float] = {}

    def run(self) -> None:
        while torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self._peaks[self.phase] = max(self._peaks.get(self.phase, 0.0), (total - free) / 2**30)
            time.sleep(0.01)

    def drain(self) -> dict[str, float]:
        """Return the peaks since the last call, in GiB."""
        peaks, self._peaks = self._peaks, {}
        return {name: round(value, 2) for name, value in peaks.items()}


def say(**values: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps({n: round(v, 4) if isinstance(v, float) else v for n, v in values.items()}), flush=True)


@dataclass(frozen=True)
class Work:
    """Work of a step on one GPU."""

    update_flops: float
    prompt_flops: float
    """Prompts are computed once a group."""
    decoded_bytes: float
    """All weights in every decoding step, and the keys and values of each sequence that still runs."""

    @classmethod
    def of(cls, workload: Workload, num_gpus: int) -> Work:
        config, lengths = SHAPES[workload.shape](), workload.lengths()
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        shape, itemsize = ModelShape.of(model), torch.bfloat16.itemsize
        unread = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
        cached = sum(n * workload.prompt + n * (n - 1) / 2 for n in lengths) / num_gpus
        batch = make_batch(workload.prompt, lengths, config.vocab_size)
        prompts = make_batch(workload.prompt, [1] * (len(lengths) // GROUP), config.vocab_size)
        return cls(
            update_flops=model_flops(config, batch, is_update=True, is_frozen=workload.lora_rank > 0) / num_gpus,
            prompt_flops=model_flops(config, prompts, is_update=False) / num_gpus,
            decoded_bytes=itemsize * (shape.kv_elements * cached + (shape.parameters - unread) * max(lengths)),
        )
