"""Models and batches of the update benchmark: shapes alone, since weights and tokens are random."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rlplug_devkit.padded_rows import PaddedRows
from transformers import LlamaConfig, Qwen3Config

from rlplug.models.shape import widths_of

SHAPES: dict[str, Any] = {
    "llama-1.7b": lambda: LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=8192,
        vocab_size=49152,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 130000.0},
    ),
    "qwen3-0.6b": lambda: Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "qwen3-1.7b": lambda: Qwen3Config(
        hidden_size=2048,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=6144,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "qwen3-4b": lambda: Qwen3Config(
        hidden_size=2560,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=9728,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=65536,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "qwen3-8b": lambda: Qwen3Config(
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151936,
        tie_word_embeddings=False,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "qwen-vocabulary": lambda: Qwen3Config(  # small blocks, so that the output layer sets the peak
        hidden_size=1024,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=3072,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
    ),
    "tiny": lambda: LlamaConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        vocab_size=512,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    ),
}


def write_config(shape: str, folder: Path, num_layers: int | None = None) -> Path:
    """Write the configuration of ``shape`` and return its folder; weights are drawn by the loader.

    Args:
        shape: Key of :data:`SHAPES`.
        folder: Where a folder with the shape's name is made.
        num_layers: Blocks, instead of the shape's.
    """
    config = SHAPES[shape]()
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        config.layer_types = None  # one for each block, which transformers makes anew
    config.architectures = ["LlamaForCausalLM" if config.model_type == "llama" else "Qwen3ForCausalLM"]
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 2
    config.save_pretrained(folder / shape)
    return folder / shape


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add the options of a step's model and rows, and of how often it is measured."""
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="llama-1.7b")
    add("--layers", type=int, help="blocks of the model, instead of the shape's")
    add("--rows", type=int, default=128, help="completions a step")
    add("--prompt", type=int, default=256, help="tokens")
    add("--completion", type=int, default=512, help="tokens, on average")
    add("--heavy-tail", action="store_true", help="lognormal completions of the same total")
    add("--longest", type=int, default=8192, help="tokens of the longest row with --heavy-tail")
    add("--smallest", type=int, default=1, help="tokens of the shortest completion with --heavy-tail")
    add("--warm-up", type=int, default=2)
    add("--repeats", type=int, default=3)
    add("--out", type=Path, help="folder for update.jsonl")


def completion_lengths(num_rows: int, mean: int, is_heavy_tailed: bool, largest: int, smallest: int = 1) -> list[int]:
    """Return completion lengths that sum to ``num_rows * mean``: all equal, or lognormal with sigma 1."""
    if not is_heavy_tailed:
        return [mean] * num_rows
    draws = torch.randn(num_rows, generator=torch.Generator().manual_seed(0)).exp()
    low, high = 0.0, float(num_rows * largest)
    for _ in range(60):  # the scale at which what limits cut off and add is made up for by the other rows
        scale = (low + high) / 2
        lengths = (draws * scale).long().clamp(smallest, largest)
        low, high = (low, scale) if int(lengths.sum()) > num_rows * mean else (scale, high)
    missing = num_rows * mean - int((lengths := (draws * low).long().clamp(smallest, largest)).sum())
    lengths[((lengths > smallest) & (lengths < largest)).nonzero()[:missing]] += 1  # what rounding left
    return lengths.tolist()  # type: ignore[no-any-return]


def make_batch(
    prompt: int, completions: list[int], vocab_size: int, group_size: int = 1, num_turns: int = 1
) -> PaddedRows:
    """Return a batch of random tokens and advantages; each row has ``prompt`` tokens before its completion.

    Args:
        prompt: Tokens of each prompt.
        completions: Tokens of each completion.
        vocab_size: Ids of the tokens are below it.
        group_size: Neighbouring rows that have the same prompt.
        num_turns: Neighbouring rows that are turns of an agent: each has those before it as its prompt.
    """
    turn = torch.arange(len(completions))[:, None] % num_turns
    history = prompt + turn * max(completions) if num_turns > 1 else torch.full((len(completions), 1), prompt)
    generator = torch.Generator().manual_seed(1)
    shape = (len(completions), int(history.max()) + max(completions))
    steps = torch.arange(shape[1])
    attention_mask = steps < history + torch.tensor(completions)[:, None]
    input_ids = torch.randint(3, vocab_size, shape, generator=generator)
    first_of_group = torch.arange(shape[0]) // group_size * group_size
    input_ids[:, :prompt] = input_ids[first_of_group, :prompt]
    for row in range(shape[0]):
        if row % num_turns:  # what the turn before it had, and said
            input_ids[row, : history[row]] = input_ids[row - 1, : history[row]]
    return PaddedRows(
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_mask=attention_mask & (steps >= history),
        rollout_logprobs=torch.zeros(shape),
        rewards=torch.zeros(shape[0]),
        reward_valid=torch.ones(shape[0], dtype=torch.bool),
        group_index=torch.arange(shape[0]) // max(group_size, num_turns, 8),
        truncated=torch.zeros(shape[0], dtype=torch.bool),
        advantages=torch.randn(shape, generator=generator),
    )


def model_flops(
    config: Any,
    batch: PaddedRows,
    is_update: bool,
    is_frozen: bool = False,
    shared: tuple[float, float] = (0.0, 0.0),
) -> float:
    """Return the floating-point operations that the batch needs, without any recomputation.

    Two for each weight of a matrix and token, ``2 n^2 H head_dim`` for a layer's causal attention over n tokens, and
    in an update twice as many again for the backward pass. The output layer counts only where the next token trains.

    Args:
        config: The model's configuration.
        batch: Sequences.
        is_update: Whether there is a backward pass.
        is_frozen: Whether adapters alone train: matrices then have no gradients of their own, and what adapters
            themselves take, under a hundredth, is left out.
        shared: Tokens, and of them the sum of squares of lengths, that rows have in common and are computed once.
    """
    query, key, mlp = widths_of(config)
    block = config.hidden_size * (2 * query + 2 * key + 3 * mlp)
    num_tokens, num_trained = sum(batch.lengths) - shared[0], int(batch.response_mask.sum())
    products = 2 * num_tokens * config.num_hidden_layers * block
    products += 2 * num_trained * config.hidden_size * config.vocab_size
    pairs = math.fsum(length**2 for length in batch.lengths) - shared[1]
    scores = 2 * query * config.num_hidden_layers * pairs
    if not is_update:
        return products + scores
    return (2 if is_frozen else 3) * products + 3 * scores


def matmul_ceiling(device: torch.device, size: int = 8192) -> float:
    """Return the FLOP/s of the best of bf16 matrix products of ``size`` cubed."""
    if device.type != "cuda":
        return float("nan")
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / best_seconds(lambda: left @ right)


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second, read and written, of the best copy of 2 GiB on the device."""
    if device.type != "cuda":
        return float("nan")
    source = torch.randn(1 << 29, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source))


def best_seconds(action: Callable[[], Any]) -> float:
    """Return what a call takes on the GPU: the best mean of five in a row, of 15 such rows after 5 to warm up."""
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(5):
            action()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000 / 5)
    return min(times[5:])
