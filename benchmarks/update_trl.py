"""Times TRL's own GRPO update, on the shapes, weights and tokens that ``update.py`` times rlplug's on.

    python benchmarks/update_trl.py --rows 128 --group-size 8 --prompt 256 --completion 512 --micro-batch 8 16 32 \\
        --variants plain liger --out OUT

Written for TRL 1.16, on one GPU. ``GRPOTrainer.train`` runs as it is; instead of generating, it is given one prepared
step in the form in which it passes completions on. What is timed is a step of its loop: the split into micro-batches,
forward and backward passes, clipping, and the optimizer's step. Rows are as those of ``update.py`` and go to the same
file. Weights are float32 and passes bfloat16, as TRL has it by default and rlplug always; ``--weights bfloat16`` also
keeps gradients and the optimizer's state in bfloat16.
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
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from accelerate.state import AcceleratorState
from datasets import Dataset
from rlplug_devkit.padded_rows import PaddedRows
from shapes import add_workload, completion_lengths, make_batch, matmul_ceiling, model_flops, write_config
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compile": {"torch_compile": True},
    "checkpointing": {"gradient_checkpointing": True},
    "liger": {"use_liger_kernel": True},
    "liger+checkpointing": {"use_liger_kernel": True, "gradient_checkpointing": True},
}
"""Options of ``GRPOConfig``. TRL's default is ``checkpointing``. In each, its output layer computes logprobs and
entropies without keeping the logits; Liger's kernels are those of the blocks."""


class UpdateClock(TrainerCallback):
    """Notes the seconds and the peak memory of each step, from its first micro-batch until gradients are cleared."""

    def __init__(self, is_cuda: bool) -> None:
        self.is_cuda = is_cuda
        self.seconds: list[float] = []
        self.peak = float("nan")

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        self.began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated() / 2**30
        self.seconds.append(time.perf_counter() - self.began)


class PreparedGRPOTrainer(GRPOTrainer):
    """``GRPOTrainer`` that has completions and advantages of a step, instead of generating and scoring them."""

    prepared: dict[str, Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
        return dict(self.prepared)


def prepare(batch: PaddedRows, prompt: int, pad_id: int, device: torch.device) -> dict[str, Tensor]:
    """Return a step as ``_generate_and_score_completions`` does: without a penalty, of the weights that train.

    Args:
        batch: Rows of ``prompt`` tokens and a completion each, padded on the right.
        prompt: Tokens of each prompt.
        pad_id: Token in place of padding.
        device: Where TRL has its inputs.
    """
    assert batch.advantages is not None
    mask = batch.attention_mask.long()
    ids = batch.input_ids.masked_fill(mask == 0, pad_id)
    step = {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": mask[:, :prompt],
        "completion_ids": ids[:, prompt:],
        "completion_mask": mask[:, prompt:],
        "advantages": batch.advantages[:, prompt],  # TRL has one for a completion
        "num_items_in_batch": mask[:, prompt:].sum(),
    }
    return {name: tensor.contiguous().to(device) for name, tensor in step.items()}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with the ids of the shapes' special tokens; TRL asks for one, and nothing is tokenized."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        padding_side="left",
    )


def no_rewards(completions: list[str], **_: Any) -> list[float | None]:
    """Stand for the reward function that TRL asks for; nothing is scored."""
    return [None] * len(completions)


def make_trainer(
    options: argparse.Namespace, variant: str, micro_batch: int, config: Path, clock: UpdateClock
) -> PreparedGRPOTrainer:
    steps = options.warm_up + options.repeats
    torch.manual_seed(0)
    with torch.device("cuda" if clock.is_cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(config), dtype=getattr(torch, options.weights)
        )
    arguments = {"gradient_checkpointing": False} | VARIANTS[variant]
    trainer = PreparedGRPOTrainer(
        model=model,
        reward_funcs=no_rewards,
        args=GRPOConfig(
            output_dir=str(config.parent / "trl"),
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=options.rows // micro_batch,
            num_generations=options.group_size,
            max_completion_length=options.longest if options.heavy_tail else options.completion,
            num_iterations=1,
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-6,
            bf16=True,
            use_cpu=not clock.is_cuda,
            optim="adamw_torch_fused",
            max_steps=steps,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["<s>"] * (steps * options.rows // options.group_size)}),
        processing_class=make_tokenizer(),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def measure(options: argparse.Namespace, variant: str, micro_batch: int, config: Path) -> dict[str, Any]:
    """Return the row of a variant with ``micro_batch`` completions a pass."""
    clock = UpdateClock(torch.cuda.is_available())
    trainer = make_trainer(options, variant, micro_batch, config, clock)
    model: Any = trainer.model
    model_config = model.config
    completions = completion_lengths(
        options.rows, options.completion, options.heavy_tail, options.longest - options.prompt, options.smallest
    )
    batch = make_batch(options.prompt, completions, model_config.vocab_size, options.group_size)
    trainer.prepared = prepare(batch, options.prompt, model_config.pad_token_id, trainer.accelerator.device)
    trainer.train()
    assert len(clock.seconds) == options.warm_up + options.repeats, "TRL's loop took other steps than it was given"
    is_compiled = isinstance(trainer.model_wrapped, torch._dynamo.eval_frame.OptimizedModule)
    assert is_compiled == VARIANTS[variant].get("torch_compile", False), "torch_compile did not reach the model"

    seconds, num_tokens = clock.seconds[options.warm_up :], sum(batch.lengths)
    median = statistics.median(seconds)
    flops = model_flops(model_config, batch, is_update=True)
    return {
        "tokens": num_tokens,
        "micro-batches": options.rows // micro_batch,
        "attention": model_config._attn_implementation,
        "loss type": trainer.loss_type,
        "update s": round(median, 3),
        "update slowest s": round(max(seconds), 3),
        "update tokens/s/GPU": round(num_tokens / median),
        "update of ceiling": round(flops / median / options.ceiling, 3),
        "update peak GiB": round(clock.peak, 1),
    }


def run(options: argparse.Namespace, variant: str, micro_batch: int, config: Path) -> dict[str, Any]:
    """Return the row of a variant, or what became of it; leave nothing of it to the next."""
    row: dict[str, Any] = {"variant": f"trl {variant}", "micro-batch rows": micro_batch}
    try:
        row |= measure(options, variant, micro_batch, config)
    except torch.OutOfMemoryError:
        row |= {"error": "out of memory"}
    except RuntimeError as error:  # of the compiler, too: the other variants still run
        row |= {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    AcceleratorState._reset_state()  # it and the environment keep torch_compile for the trainers that follow
    for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO_")]:
        del os.environ[name]
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload(parser)
    parser.add_argument("--group-size", type=int, default=8, help="completions of one prompt; TRL wants two or more")
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[16], metavar="ROWS", help="rows a pass, each")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["plain"], metavar="NAME")
    parser.add_argument("--weights", default="float32", choices=["float32", "bfloat16"], help="dtype that trains")
    options = parser.parse_args()
    if options.group_size < 2 or options.rows % options.group_size:
        parser.error(f"--group-size {options.group_size} must be 2 or more and divide --rows {options.rows}")
    uneven = [size for size in options.micro_batch if size < 1 or options.rows % size]
    if uneven:
        parser.error(f"--micro-batch {uneven[0]} must divide --rows {options.rows}")
    if torch.cuda.device_count() > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("this times one GPU, and TRL takes all that it sees: set CUDA_VISIBLE_DEVICES=0, without torchrun")
    is_liger = ["use_liger_kernel" in VARIANTS[variant] for variant in options.variants]
    if any(is_liger) and not torch.cuda.is_available():
        parser.error("Liger's kernels need a GPU: leave its variants out")
    if is_liger != sorted(is_liger):
        parser.error("Liger's rotary embedding stays for the rest of the process: give its variants last")
    return options


def main() -> None:
    options = parse()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    options.ceiling = matmul_ceiling(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    facts = vars(options) | {"ceiling TFLOP/s": options.ceiling / 1e12}
    facts |= {package.__name__: package.__version__ for package in (torch, transformers, trl)}
    del facts["out"]
    print(f"# {json.dumps(facts)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(options.shape, Path(folder), options.layers)
        for variant, micro_batch in itertools.product(options.variants, options.micro_batch):
            row = run(options, variant, micro_batch, config)
            print(json.dumps(row), flush=True)
            if options.out is not None:
                options.out.mkdir(parents=True, exist_ok=True)
                with (options.out / "update.jsonl").open("a") as file:
                    file.write(json.dumps(facts | row) + "\n")


if __name__ == "__main__":
    main()
