"""What both sides of the step benchmark do: models, prompts, lengths of completions, and what is measured of each."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shapes import SHAPES, completion_lengths, make_batch, model_flops, write_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from rlplug.batching import rank_share

GROUP = 8


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
    "8b": Workload("qwen3-8b", num_completions=512, kv_cache_share=0.45),
    "tiny": Workload("tiny", num_completions=16, prompt=16, completion=24, longest=48, smallest=4),
}


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
    """Let vLLM's engine, in whatever trainer, stop the i-th request of a step at the i-th length, and never before."""
    from vllm.v1.engine.llm_engine import LLMEngine

    add_request, lengths = LLMEngine.add_request, lengths_of_this_rank(workload)

    def with_length(self: Any, request_id: str, prompt: Any, params: Any, *others: Any, **named: Any) -> Any:
        params = params.clone()
        params.max_tokens, params.ignore_eos, params.stop_token_ids = next(lengths), True, []
        return add_request(self, request_id, prompt, params, *others, **named)

    LLMEngine.add_request = with_length  # type: ignore[method-assign]


def lengths_of_this_rank(workload: Workload) -> Iterator[int]:
    """Yield the lengths of this rank's requests, step after step; asked for the first when ranks have their places."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    yield from itertools.cycle(rank_share(workload.lengths(), rank, size))


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


def floor_seconds(workload: Workload, flops: float, bandwidth: float, world_size: int) -> dict[str, float]:
    """Return the least time of a step's parts, from the ceilings of one GPU in FLOP/s and bytes/s.

    Decoding reads all weights once a step, and the KV cache of every sequence that still runs. Prompts are computed
    once a group. The update is :func:`shapes.model_flops`.
    """
    config, lengths = SHAPES[workload.shape](), workload.lengths()
    kv_bytes, weight_bytes = kv_bytes_per_token(config), 2 * num_parameters(config)
    read = sum(kv_bytes * (n * workload.prompt + n * (n - 1) / 2) for n in lengths) / world_size
    decode = (read + weight_bytes * max(lengths)) / bandwidth
    prompts = make_batch(workload.prompt, [1] * (len(lengths) // GROUP), config.vocab_size)
    prefill = model_flops(config, prompts, is_update=False) / flops / world_size
    batch = make_batch(workload.prompt, lengths, config.vocab_size)
    return {"rollout": decode + prefill, "update": model_flops(config, batch, is_update=True) / flops / world_size}


def kv_bytes_per_token(config: Any) -> int:
    """Return the bytes of a token's keys and values in bf16."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim)


def num_parameters(config: Any) -> int:
    """Return how many weights a decoding step reads: all but input embeddings that are not the output layer's too."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    unread = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    return sum(parameter.numel() for parameter in model.parameters()) - unread
