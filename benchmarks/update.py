"""Times the update, and the logprob phase before it, of each trainer and optimization; compares their results.

    python benchmarks/update.py --shape llama-1.7b --rows 128 --prompt 256 --completion 512 --out OUT
    python benchmarks/update.py --variants compile+fused "titan compile+fused" --phases mismatch update --out OUT
    python benchmarks/update.py --group-size 8 --prompt 1024 --variants compile+fused "compile+fused, shared"
    torchrun --nproc-per-node 4 benchmarks/update.py --shape qwen3-8b --rows 16 --prompt 256 --completion 16128 \\
        --max-tokens 16384 --variants compile+fused --strategy '{"sequence": 2}'
    torchrun --nproc-per-node 2 benchmarks/update.py --phases gradients --variants plain --dtype float32 \\
        --strategy '{}' '{replicate: 2}' '{tensor: 2}'

Weights and tokens are random; loading, packing, clipping and the optimizer's step are the product's own and are timed.
A row says: seconds of the phase (median), tokens per second and GPU, share of the matrix-product ceiling (measured in
the same run; recomputation counts as waste), and the peak of the GPU memory that PyTorch allocated. The phases
``mismatch`` and ``gradients`` compare logprobs, loss and gradients with those of the first variant under the first
strategy, or with ``--reference`` those of an earlier run; give them first, because an update changes the weights. With
``--lora RANK`` adapters train alone, and their gradients are compared.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import rlplug_optims
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from rlplug_algos.grpo import GRPO
from rlplug_optims.shared_prefixes.layout import PrefixLayout
from rlplug_optims.state_offload import StateOffload
from rlplug_trainer_titan import TorchTitan
from shapes import add_workload, completion_lengths, make_batch, matmul_ceiling, model_flops, write_config
from torch import nn
from update_comparison import Comparison

from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.errors import ConfigError
from rlplug.interfaces import ModelConfig, ModelTrainer, Optimization
from rlplug.models.build import build_policy
from rlplug.models.loading import copy_part
from rlplug.models.lora.config import LoRAConfig
from rlplug.models.shape import attention_cost
from rlplug.models.transformers_trainer import TRANSFORMERS
from rlplug.training.actor_critic import ActorCritic, TrainableModel
from rlplug.training.batch_plan import BatchPlan, BatchSizes
from rlplug.training.passes import MicroBatchRunner
from rlplug.training.update import MiniBatchResult, PolicyUpdate, policy_losses
from rlplug.types import SamplingParams
from rlplug.weight_sync.hf_names import adapters_of

VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "plain in float32": [],
    "fused": ["FusedLogprobs"],
    "liger": ["Liger"],
    "compile": ["CompileBlocks"],
    "liger+fused": ["Liger", "FusedLogprobs"],
    "compile+fused": ["CompileBlocks", "FusedLogprobs"],
    "entropy chunks": ["EntropyChunking"],
    "checkpointing": ["GradientCheckpointing"],
    "checkpointing in float32": ["GradientCheckpointing"],
    "selective": ["SelectiveCheckpointing"],
    "activation offload": ["ActivationOffload"],
    "low memory": ["GradientCheckpointing", "ActivationOffload", "FusedLogprobs"],
    "compile+fused, logits kept": ["CompileBlocks", "FusedLogprobs {recompute: false}"],
    "compile+fused+fa4": ["CompileBlocks", "FusedLogprobs", "FlashAttention4"],
    "compile+fused+fa4, logits kept": ["CompileBlocks", "FusedLogprobs {recompute: false}", "FlashAttention4"],
    "compile+fused+checkpointing": ["GradientCheckpointing", "CompileBlocks", "FusedLogprobs"],
    "compile+fused+selective": ["SelectiveCheckpointing", "CompileBlocks", "FusedLogprobs"],
    "compile+fused+attention kept": ["SelectiveCheckpointing {save: [attention]}", "CompileBlocks", "FusedLogprobs"],
    "compile+fused+fa4+attention kept": [
        *("SelectiveCheckpointing {save: [attention]}", "CompileBlocks", "FusedLogprobs", "FlashAttention4"),
    ],
    "compile+fused+fa4+selective": ["SelectiveCheckpointing", "CompileBlocks", "FusedLogprobs", "FlashAttention4"],
    "compile+fused+fa4+checkpointing": ["GradientCheckpointing", "CompileBlocks", "FusedLogprobs", "FlashAttention4"],
    "compile+fused+half": ["GradientCheckpointing {every_n_blocks: 2}", "CompileBlocks", "FusedLogprobs"],
    "backward prefetch": ["BackwardPrefetch"],
    "compile+fused+prefetch 1": ["CompileBlocks", "FusedLogprobs", "ForwardPrefetch"],
    "compile+fused+prefetch 2": ["CompileBlocks", "FusedLogprobs", "ForwardPrefetch {depth: 2}"],
    "compile+fused+both prefetches": ["CompileBlocks", "FusedLogprobs", "ForwardPrefetch", "BackwardPrefetch"],
    "titan": ["TorchTitan"],
    "titan in float32": ["TorchTitan"],
    "titan+fused": ["TorchTitan", "FusedLogprobs"],
    "titan+compile blocks+fused": ["TorchTitan", "CompileBlocks", "FusedLogprobs"],
    "titan compile+fused": ["TorchTitan {compile: true}", "FusedLogprobs"],
    "titan compile, selective+fused": ["TorchTitan {compile: true, activation_checkpoint: selective}", "FusedLogprobs"],
    "titan compile, full+fused": ["TorchTitan {compile: true, activation_checkpoint: full}", "FusedLogprobs"],
    "titan compile, float8+fused": ["TorchTitan {compile: true, float8: rowwise}", "FusedLogprobs"],
    "titan compile, float8 gw+fused": ["TorchTitan {compile: true, float8: rowwise_with_gw_hp}", "FusedLogprobs"],
    "titan float8 emulated": ["TorchTitan {float8: emulated}"],
}
"""Optimizations, after the trainer where it is not that of transformers."""

SHARED = ", shared"
"""After the name of a variant: what rows of a group have in common is computed once."""
PHASES = ("update", "logprobs", "mismatch", "gradients", "offload")


class Measured(LightningModule):
    """Runs the phases of one variant and notes what they took."""

    automatic_optimization = False

    def __init__(self, options: argparse.Namespace, variant: str, folder: Path) -> None:
        super().__init__()
        self.options, self.variant, self.folder = options, variant, folder
        self.row: dict[str, Any] = {}

    def configure_model(self) -> None:
        dtype = "float32" if "float32" in self.variant else self.options.dtype
        config = ModelConfig(path=str(self.folder), init="random", dtype=dtype)
        parts = [make_part(text) for text in VARIANTS[self.variant.removesuffix(SHARED)]]
        optimizations = [part for part in parts if isinstance(part, Optimization)]
        (self.model_trainer,) = [part for part in parts if isinstance(part, ModelTrainer)] or [TRANSFORMERS]
        self.model_trainer.check(config, "model.policy", self.trainer.strategy.mesh_sizes(self.trainer.world_size))
        rank = self.options.lora
        lora = LoRAConfig(rank=rank, alpha=2 * rank, seed=1) if rank else None
        self.policy, effects = build_policy(config, optimizations, self.trainer.strategy, self.model_trainer, lora=lora)
        if lora is not None:
            draw_adapters(self.policy)
        if self.trainer.is_global_zero:
            print(f"# {self.variant}: {'; '.join(effect.description for effect in effects)}", flush=True)

    def configure_optimizers(self) -> Any:
        if self.options.optimizer == "sgd":
            return torch.optim.SGD(self.policy.parameters(), lr=1e-6)
        return torch.optim.AdamW(self.policy.parameters(), lr=1e-6, fused=True)

    def training_step(self, tick: Any, index: int) -> None:
        options, strategy = self.options, self.trainer.strategy
        completions = completion_lengths(
            options.rows, options.completion, options.heavy_tail, options.longest - options.prompt, options.smallest
        )
        batch = make_batch(
            options.prompt, completions, self.policy.config.vocab_size, options.group_size, options.turns
        )
        is_shared = self.variant.endswith(SHARED)
        sizes = BatchSizes(prompts_per_step=options.rows, group_size=1, max_tokens_per_gpu=options.max_tokens)
        plan = BatchPlan(
            sizes,
            self.trainer.world_size,
            data_size=strategy.data_size,
            sequence_size=strategy.sequence_size,
            longest=max(batch.lengths),
            quadratic_cost=attention_cost(self.policy.config),
            layout=PrefixLayout(self.device.type == "cuda") if is_shared else None,
        )
        models = ActorCritic(
            policy=TrainableModel("policy", self.policy, self.optimizers(), None, 1.0),
            critic=None,
            critic_config=None,
            reference=None,
            algorithm=GRPO(),
            sampling=SamplingParams(),
            loss_hook=None,
        )
        runner, indices = MicroBatchRunner(plan, strategy), range(batch.num_sequences)
        own = (batch.group_index % strategy.world_size == strategy.global_rank).nonzero().flatten()
        mine = batch.map(lambda tensor: tensor[own]).flat(strategy.statistics)
        rows = runner.rows_of(mine)
        update = PolicyUpdate(
            partial(policy_losses, models), models, runner, self.manual_backward, skip_nonfinite=False, seed=0
        )
        phases = {
            "logprobs": lambda: runner.forward_only(runner.fetch(rows, indices, "forward"), models.forward_policy),
            "update": lambda: update.run(mine, 1),
        }
        loss_fn = update.losses(1)[0]
        self.row = {"variant": self.variant, "tokens": sum(batch.lengths)}
        self.row["micro-batches"] = len(runner.fetch(rows, indices, "update").micro_batches)
        shared = shared_work(options, batch.num_sequences) if is_shared else (0.0, 0.0)
        for name in options.phases:
            if name in ("mismatch", "gradients"):
                result = update.forward_backward(rows, indices, loss_fn)
                self.row |= self.compare(result, mine.per_token["response_mask"], has_gradients=name == "gradients")
                continue
            if name == "offload":
                self.row |= self.measure_offload(phases["update"])
                continue
            is_frozen = options.lora > 0
            flops = model_flops(self.policy.config, batch, name == "update", is_frozen, shared)
            self.row |= self.measure(name, phases[name], flops / self.trainer.world_size, sum(batch.lengths))

    def measure(self, name: str, phase: Any, flops_per_gpu: float, num_tokens: int) -> dict[str, float]:
        """Return what the phase takes, after as many unmeasured runs as compilation wants."""
        is_cuda = self.device.type == "cuda"
        seconds = []
        for index in range(self.options.warm_up + self.options.repeats):
            if is_cuda:
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            self.trainer.strategy.barrier()
            began = time.perf_counter()
            phase()
            if is_cuda:
                torch.cuda.synchronize()
            if index >= self.options.warm_up:
                seconds.append(time.perf_counter() - began)
        if self.options.profile:
            self.profile(name, phase)
        median = statistics.median(seconds)
        return {
            f"{name} s": round(median, 3),
            f"{name} slowest s": round(max(seconds), 3),
            f"{name} tokens/s/GPU": round(num_tokens / median / self.trainer.world_size),
            f"{name} of ceiling": round(flops_per_gpu / median / self.options.ceiling, 3),
            f"{name} peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 1) if is_cuda else float("nan"),
        }

    def compare(self, result: MiniBatchResult, trained: Any, has_gradients: bool) -> dict[str, Any]:
        """Return how far logprobs, loss and gradients are from the first ones, on the first rank. Collective."""
        assert result.tokens is not None, "the mini-batch is the whole step"
        weights, gradients = {} if self.options.lora else self.model_trainer.hf_weights(self.policy), {}
        for name, parameter in self.policy.named_parameters() if has_gradients else ():
            if not parameter.requires_grad:
                continue  # what is frozen beside adapters
            whole = parameter.grad.full_tensor()
            gradients |= {weight.name: weight.of(whole) for weight in weights[name]} if weights else {name: whole}
        self.policy.zero_grad()
        logprobs = self.trainer.strategy.gather_arrays(result.tokens.logprobs.numpy()[trained])
        if not self.trainer.is_global_zero:
            return {}
        differences: dict[str, Any] = self.options.comparison.differences(
            torch.from_numpy(logprobs), result.metrics["loss"], gradients
        )
        return differences

    def measure_offload(self, update: Any) -> dict[str, float]:
        """Return what leaves for the host and how long that takes, and the update that it comes back in."""
        optimizer = self.optimizers().optimizer
        offload = StateOffload("optimizer_and_weights", self.device, [self.policy], [], [optimizer])
        row: dict[str, float] = {}
        for _ in range(self.options.warm_up + 1):
            for name, action in (
                ("park optimizer s", offload.before_engine_wakes),
                ("park weights s", offload.before_generation),
                ("restore weights s", offload.after_generation),
                ("update with restore s", lambda: [offload.before_update(), update()]),
                ("update s", update),
            ):
                torch.cuda.synchronize()
                began = time.perf_counter()
                action()
                torch.cuda.synchronize()
                row[name] = round(time.perf_counter() - began, 3)
                if name == "park weights s":
                    row["GiB left on the GPU"] = round(torch.cuda.memory_allocated() / 2**30, 2)
        return row | {"offloaded GiB": round(offload.pop_metrics()["offload/gib"], 1)}

    def profile(self, name: str, phase: Any) -> None:
        """Print what the device spends its time on in one more run of the phase."""
        with torch.profiler.profile() as profiler:
            phase()
        table = profiler.key_averages().table(sort_by="self_device_time_total", row_limit=self.options.profile)
        if self.trainer.is_global_zero:
            print(f"# {self.variant}, {name}:\n{table}", flush=True)


def shared_work(options: argparse.Namespace, num_rows: int) -> tuple[float, float]:
    """Return the tokens that rows share, and the sum of the squares of their numbers."""
    if options.turns > 1:
        parts = [options.prompt + turn * options.completion for turn in range(1, options.turns)]
        parts *= num_rows // options.turns
    else:
        parts = [options.prompt] * (num_rows - num_rows // options.group_size)
    return float(sum(parts)), float(sum(part**2 for part in parts))


@torch.no_grad()
def draw_adapters(policy: nn.Module) -> None:
    """Give B values, as after some training: it starts at zero, and A would have no gradient."""
    adapters = adapters_of(policy)
    assert adapters is not None
    generator = torch.Generator().manual_seed(2)
    for update in adapters.updates.values():
        copy_part(update.up.weight, torch.randn(update.up.weight.shape, generator=generator) * 0.02)


def make_part(text: str) -> Optimization | ModelTrainer:
    """Make ``Name {option: value}``, an optimization or a trainer."""
    name, _, arguments = text.partition(" ")
    part_class: Any = TorchTitan if name == "TorchTitan" else getattr(rlplug_optims, name)
    part: Optimization | ModelTrainer = part_class(**(yaml.safe_load(arguments) or {}))
    return part


def run(options: argparse.Namespace, variant: str, strategy: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run the phases of one variant under one strategy; return its row."""
    module = Measured(options, variant, folder)
    trainer = Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=RLFSDP2Strategy(**strategy),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, train_dataloaders=torch.utils.data.DataLoader([0]))
    except torch.OutOfMemoryError:
        module.row = {"variant": variant, "error": "out of memory"}
    except (ConfigError, RuntimeError) as error:  # of the compiler, too: the other variants still run
        module.row |= {"variant": variant, "error": f"{type(error).__name__}: {str(error)[:500]}"}
    row = module.row
    trainer.strategy.teardown()
    del module, trainer
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload(parser)
    parser.add_argument("--max-tokens", type=int, default=16384, help="per micro-batch and GPU")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "sgd"], help="sgd keeps no state")
    parser.add_argument("--group-size", type=int, default=1, help="completions of one prompt, which they share")
    parser.add_argument("--turns", type=int, default=1, help="rows that are turns of an agent, with those before them")
    choices = [*VARIANTS, *(name + SHARED for name in VARIANTS)]
    parser.add_argument("--variants", nargs="+", choices=choices, default=["plain", "compile+fused"], metavar="NAME")
    parser.add_argument(
        "--strategy", type=yaml.safe_load, nargs="+", default=[{}], help="options of RLFSDP2Strategy, as YAML, each"
    )
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters on all linear layers alone")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=["update", "logprobs"])
    parser.add_argument("--profile", type=int, default=0, metavar="ROWS", help="print the costliest kernels")
    parser.add_argument("--reference", type=Path, help="file of the gradients to compare with; written where missing")
    options = parser.parse_args()
    is_liger = ["Liger" in VARIANTS[variant.removesuffix(SHARED)] for variant in options.variants]
    if is_liger != sorted(is_liger):
        parser.error("Liger's rotary embedding stays for the rest of the process: give its variants last")
    return options


def main() -> None:
    options = parse()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    is_first = os.environ.get("RANK", "0") == "0"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    options.ceiling = matmul_ceiling(device)
    facts = vars(options) | {"torch": torch.__version__, "ceiling TFLOP/s": options.ceiling / 1e12}
    del facts["out"], facts["reference"]
    options.comparison = Comparison(options.reference)
    if is_first:
        print(f"# {json.dumps(facts)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(options.shape, Path(folder), options.layers)
        for strategy, variant in itertools.product(options.strategy, options.variants):
            row = run(options, variant, strategy, config)
            row |= {"strategy": strategy} if strategy else {}
            if is_first:
                print(json.dumps(row), flush=True)
            if is_first and options.out is not None:
                options.out.mkdir(parents=True, exist_ok=True)
                with (options.out / "update.jsonl").open("a") as file:
                    file.write(json.dumps(facts | row) + "\n")


if __name__ == "__main__":
    main()
