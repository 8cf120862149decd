"""Times updates of a hybrid policy on packed and on padded rows.

    python benchmarks/hybrids.py --out OUT
    python benchmarks/hybrids.py --ways packed sorted --rows 32 --max-tokens 4096 --no-kernels --out OUT
    python benchmarks/hybrids.py --shape tiny --rows 12 --mean 24 --longest 200 --max-tokens 256 --repeats 1 --out OUT

An update is forward and backward passes of all rows, clipping and AdamW's step of one policy, with random weights and
lognormal lengths; gradients are reduced once, and ``--gathered`` keeps gathered weights from pass to pass. ``packed``
rows go through ``HybridTrainer``; ``padded`` and ``sorted`` ones are batches [S, T] with a mask and transformers' sdpa,
in the order in which they came and by length. A line says: seconds (median), those of the first update, in which
kernels are tuned and compiled, tokens per second, share of the ceiling of matrix products in bfloat16 (measured in the
same run), the peak of GPU memory, padding (tokens computed for each real one), and by what ways layers keep sequences
apart. ``--no-kernels`` computes with transformers' functions in torch, although kernels are installed. hybrid_leaks.py
tries the leak check.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch import LightningModule, Trainer
from rlplug_hybrids import HybridTrainer
from rlplug_hybrids.layers import kernels_of, stateful_layers, without_kernels
from shapes import completion_lengths, matmul_ceiling
from torch import Tensor, nn
from transformers import AutoConfig
from update import make_part

from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.interfaces import ModelConfig
from rlplug.models.build import build_policy
from rlplug.models.forward import policy_forward
from rlplug.models.loading import empty_model
from rlplug.models.packing import PackedMicroBatch, PackedTokens
from rlplug.models.transformers_trainer import TransformersTrainer
from rlplug.ops import token_logprobs
from rlplug.types import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "hybrids" / "tests"))
from hybrid_models import COMMON, FAMILIES

TYPES: Final = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "1b": {  # of Qwen3.5's form, 1.1B parameters: 24 layers, one in four with attention
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 4608,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "layer_types": TYPES * 6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "tiny": COMMON | FAMILIES["qwen3_5_text"] | {"max_position_embeddings": 1024},
}
CHUNK: Final = 64  # tokens that delta rules compute at once, in fla and in transformers
WAYS: Final = ("packed", "padded", "sorted")


class Measured(LightningModule):
    """Builds one policy on the device as a run does, and runs ``phase`` with it."""

    automatic_optimization = False

    def __init__(
        self,
        config: ModelConfig,
        model_trainer: TransformersTrainer,
        phase: Callable[[Any], None],
        optimizations: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.config, self.model_trainer, self.phase = config, model_trainer, phase
        self.optimizations = [make_part(text) for text in optimizations]
        self.effects: list[str] = []

    def configure_model(self) -> None:
        self.policy, effects = build_policy(self.config, self.optimizations, self.trainer.strategy, self.model_trainer)
        self.effects = [effect.description for effect in effects]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.policy.parameters(), lr=1e-6, fused=True)

    def training_step(self, tick: Any, index: int) -> None:
        self.phase(self)


def run(module: Measured, **strategy: Any) -> None:
    """Run a module's phase, in a process group of this process alone."""
    trainer = Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        strategy=RLFSDP2Strategy(**strategy),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, train_dataloaders=torch.utils.data.DataLoader([0]))
    finally:
        trainer.strategy.teardown()
        del trainer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def start() -> tuple[torch.device, dict[str, Any]]:
    """Return the device, and what each line says of it; Lightning says no more than errors."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return device, {"device": where, "torch": torch.__version__}


def say(out: Path | None, facts: dict[str, Any], line: dict[str, Any]) -> None:
    """Print a line, and append it to ``hybrids.jsonl`` in a folder."""
    print(json.dumps(line), flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        with (out / "hybrids.jsonl").open("a") as file:
            file.write(json.dumps(facts | line) + "\n")


def micro_batches(lengths: list[int], max_tokens: int, way: str) -> list[list[int]]:
    """Return indices of the rows of each micro-batch, of at most ``max_tokens`` computed tokens where rows allow it."""
    order = list(range(len(lengths)))
    if way == "packed":
        found: list[list[int]] = []
        for row in sorted(order, key=lambda each: -lengths[each]):  # first fit, the longest first
            fits = (b for b in found if sum(lengths[each] for each in b) + lengths[row] <= max_tokens)
            micro_batch = next(fits, None)
            if micro_batch is None:
                found.append(micro_batch := [])
            micro_batch.append(row)
        return found
    if way == "sorted":
        order.sort(key=lambda each: -lengths[each])
    found = [[]]
    for row in order:
        wider = [*found[-1], row]
        if found[-1] and len(wider) * max(lengths[each] for each in wider) > max_tokens:
            found.append([row])
        else:
            found[-1] = wider
    return found


def packed_logprobs(policy: nn.Module, rows: list[Tensor]) -> Tensor:
    """Return the logprobs of every token but each row's first, of rows end to end, float32 [K]."""
    lengths = torch.tensor([len(row) for row in rows])
    ids, borders = torch.cat(rows), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    trains = torch.ones(len(ids), dtype=torch.bool)
    trains[borders[:-1]] = False
    places = trains.nonzero()[:, 0]
    positions = torch.cat([torch.arange(int(length)) for length in lengths])
    packed = PackedTokens(
        input_ids=ids[None],
        position_ids=positions[None],
        cu_seqlens=borders.to(torch.int32),
        max_length=int(lengths.max()),
        predicting=places - 1,
        targets=ids[places],
        slots=torch.arange(len(places)),
        num_trained=len(places),
    )
    nothing: Any = None  # models read the row alone
    micro_batch = PackedMicroBatch(nothing, packed.to(next(policy.parameters()).device))
    return policy_forward(policy, micro_batch, SamplingParams(), "none").tokens.logprobs


def padded_logprobs(policy: Any, rows: list[Tensor]) -> Tensor:
    """Return the same of a batch [S, T] with a mask."""
    device = next(policy.parameters()).device
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(device)
    logits = policy(input_ids=ids, attention_mask=mask, use_cache=False).logits
    trains = mask[:, 1:].bool()
    return token_logprobs(logits[:, :-1][trains].float(), ids[:, 1:][trains])


def measure_update(options: argparse.Namespace, way: str, rows: list[Tensor], module: Measured) -> dict[str, Any]:
    """Return a line of the update's time in one way."""
    policy: Any = module.policy
    policy.set_attn_implementation("packed" if way == "packed" else "sdpa")
    optimizer: Any = module.optimizers()
    lengths = [len(row) for row in rows]
    plan = micro_batches(lengths, options.max_tokens, way)
    logprobs_of = packed_logprobs if way == "packed" else padded_logprobs
    is_cuda = module.device.type == "cuda"

    def update() -> None:
        for index, micro_batch in enumerate(plan, 1):
            module.trainer.strategy.set_last_micro_batch(policy, index == len(plan))
            logprobs = logprobs_of(policy, [rows[each] for each in micro_batch])
            module.manual_backward(-logprobs.sum() / sum(lengths))
        module.trainer.strategy.clip_grad_norm(policy, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = []
    for _ in range(options.warm_up + options.repeats):
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        began = time.perf_counter()
        update()
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    first, seconds = seconds[0], seconds[options.warm_up :]
    peak = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else math.nan
    if options.profile:
        with torch.profiler.profile(record_shapes=True) as profiler:
            update()
        for grouped in (False, True):
            averages = profiler.key_averages(group_by_input_shape=grouped)
            table = averages.table(
                sort_by="self_device_time_total", row_limit=options.profile, max_name_column_width=60
            )
            print(f"# {way}:\n{table}", flush=True)
    median, computed = statistics.median(seconds), sum(lengths)
    widest = sum(len(each) * max(lengths[row] for row in each) for each in plan)
    return {
        "rows": way,
        "micro-batches": len(plan),
        "s": round(median, 3),
        "slowest s": round(max(seconds), 3),
        "first s": round(first, 1),
        "tokens/s": round(computed / median),
        "of ceiling": round(update_flops(policy, lengths) / median / options.ceiling, 3),
        "peak GiB": round(peak, 1) if is_cuda else None,
        "padding": round(widest / computed, 2),  # of packed rows: what layers without kernels compute
        "ways": module.effects,
    }


def update_flops(policy: Any, lengths: list[int]) -> float:
    """Return what forward and backward passes need, nothing computed twice, of a model of Qwen3.5's form.

    Two for each weight of a matrix and token; ``2 n^2 H d`` in causal attention; in a delta rule by chunks of C tokens
    ``H (6 dk dv + C (4 dk + 2 dv) + C (dk + dv))`` a token; and twice as many in the backward pass.
    """
    config, tokens = policy.config.get_text_config(), sum(lengths)
    matrices = {name: each.numel() for name, each in policy.named_parameters() if each.ndim == 2}
    blocks = sum(count for name, count in matrices.items() if "embed" not in name)
    if not config.tie_word_embeddings:
        blocks -= config.vocab_size * config.hidden_size
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    rule = config.linear_num_value_heads * (6 * key * value + CHUNK * (5 * key + 3 * value))
    width = config.num_attention_heads * config.head_dim
    forward = 2.0 * blocks * tokens + 2 * config.vocab_size * config.hidden_size * (tokens - len(lengths))
    forward += config.layer_types.count("linear_attention") * rule * tokens
    forward += config.layer_types.count("full_attention") * 2 * width * math.fsum(n * n for n in lengths)
    return 3 * forward


def update(options: argparse.Namespace, folder: Path, say: Callable[[dict[str, Any]], None]) -> None:
    """Measure the update in each way, with one policy each."""
    shape = SHAPES[options.shape]
    lengths = completion_lengths(options.rows, options.mean, True, options.longest, 2)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, shape["vocab_size"], (length,), generator=generator) for length in lengths]
    AutoConfig.for_model("qwen3_5_text", **shape).save_pretrained(folder)
    for way in options.ways:
        line: dict[str, Any] = {"phase": "update", "shape": options.shape, "rows": way}
        line["optimizations"] = options.optimizations if way == "packed" else []

        def phase(module: Measured, way: str = way, line: dict[str, Any] = line) -> None:
            line.update(measure_update(options, way, rows, module))

        config = ModelConfig(str(folder), init="random", dtype=options.dtype)
        try:
            with in_torch(config) if options.no_kernels else contextlib.nullcontext():
                optimizations = options.optimizations if way == "packed" else ()
                run(Measured(config, HybridTrainer(), phase, optimizations), **options.strategy)
        except torch.OutOfMemoryError:
            line["error"] = "out of memory"
        except RuntimeError as error:  # of a kernel; the other ways still run
            line["error"] = f"{type(error).__name__}: {str(error)[:500]}"
        layers = {type(layer) for layer in stateful_layers(empty_model(config)).values()}
        kernels = {kernel.package: kernel.is_used for each in layers for kernel in kernels_of(each)}
        say(line | {"kernels": kernels, "no kernels": options.no_kernels})


def in_torch(config: ModelConfig) -> Any:
    return without_kernels(stateful_layers(empty_model(config)).values())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="1b")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add("--rows", type=int, default=128)
    add("--mean", type=int, default=768, help="tokens of a row, on average")
    add("--longest", type=int, default=8192, help="tokens of the longest row")
    add("--max-tokens", type=int, default=8192, help="of a micro-batch, padding included")
    add("--no-kernels", action="store_true", help="transformers' functions in torch")
    add("--optimizations", nargs="+", default=[], metavar="PART", help="of packed rows, as update.py names them")
    add("--gathered", action="store_true", help="keep gathered weights until the update ends")
    add("--profile", type=int, default=0, metavar="ROWS", help="print the costliest kernels of an update")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--warm-up", type=int, default=2)
    add("--repeats", type=int, default=3)
    add("--out", type=Path, help="folder for hybrids.jsonl")
    return parser.parse_args()


def main() -> None:
    options = parse()
    device, facts = start()
    options.ceiling = matmul_ceiling(device)
    options.strategy = dict.fromkeys(("reshard_after_forward", "reshard_after_backward"), not options.gathered)
    facts |= {"ceiling TFLOP/s": options.ceiling / 1e12}
    print(f"# {json.dumps(facts)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        update(options, Path(folder), partial(say, options.out, facts))


if __name__ == "__main__":
    main()
