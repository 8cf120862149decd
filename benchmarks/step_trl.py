"""TRL's side of the step benchmark: ``GRPOTrainer`` with vLLM in the trainer's process. ``step.py`` starts it.

Written for TRL 1.16. Its own profiler says what the phases take; a phase may contain others.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # as rlplug has it; it would compile at the start
for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}.items():
    os.environ.setdefault(key, value)
os.environ.setdefault("LOCAL_RANK", "0")

import torch  # noqa: E402 - what is above must be set before vLLM is imported
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from step_work import (  # noqa: E402
    GROUP,
    WORKLOADS,
    MemoryWatch,
    Workload,
    prepare,
    random_reward,
    say,
    share_stop_rule,
    write_prompts,
)
from transformers import AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.extras.profiling import ProfilingContext  # noqa: E402

VARIANTS: dict[str, dict[str, bool]] = {
    "plain": {"liger": False},
    "liger": {},
    "liger, no checkpointing": {"checkpointing": False},
    "liger, no checkpointing, no correction": {"checkpointing": False, "correction": False},
    "plain, no checkpointing, no correction": {"liger": False, "checkpointing": False, "correction": False},
}
"""Differences from TRL's defaults with its Liger kernels, which need a GPU. Without its correction of the mismatch
between engine and trainer it computes no old logprobs."""


class StepClock(TrainerCallback):
    """Prints a line for each step: the time since the last one ended, with all that lies between."""

    def __init__(self, variants: list[str], steps: int) -> None:
        self.variants, self.steps = variants, steps
        self.trainer: Any = None
        self.watch = MemoryWatch()
        self.phases: dict[str, float] = {}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.watch.start()
        self.watch.phase = "step"
        self.ended = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Turn to the next variant after every so many steps."""
        index, step = divmod(state.global_step, self.steps)
        if step == 0:
            chosen, model = VARIANTS[self.variants[index]], self.trainer.model
            self.trainer.vllm_importance_sampling_correction = chosen.get("correction", True)
            if chosen.get("checkpointing", True):
                model.gradient_checkpointing_enable({"use_reentrant": False})
            else:
                model.gradient_checkpointing_disable()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.ended
        phases = {name: round(value, 4) for name, value in self.phases.items()}
        index, step = divmod(state.global_step - 1, self.steps)
        say(variant=self.variants[index], step=step + 1, seconds=seconds, phases=phases, peaks=self.watch.drain())
        self.phases.clear()
        self.ended = time.perf_counter()

    def note(self, context: ProfilingContext, seconds: float) -> None:
        name = context.name.rpartition(".")[2]
        self.phases[name] = self.phases.get(name, 0.0) + seconds


def adapters(workload: Workload) -> LoraConfig | None:
    """Return the same adapters as rlplug's side has: on all linear layers but the output layer, without dropout."""
    rank = workload.lora_rank
    if not rank:
        return None
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def train(workload: Workload, variants: list[str], model: Path, prompts: Path, steps: int, out: Path) -> None:
    clock, peft_config, on_gpu = StepClock(variants, steps), adapters(workload), torch.cuda.is_available()
    ProfilingContext._log_metrics = lambda context, seconds: clock.note(context, seconds)
    fits = workload.padded_tokens // (workload.prompt + workload.longest)  # rows are padded to the longest
    micro_batch = max(size for size in (1, 2, 4, 8, 16, 32) if size <= min(fits, workload.num_completions))
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=lambda completions, **_: [random_reward(completion) for completion in completions],
        args=GRPOConfig(
            output_dir=str(out),
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=workload.num_completions // micro_batch,
            use_liger_kernel=VARIANTS[variants[0]].get("liger", True),
            num_generations=GROUP,
            max_completion_length=workload.longest,
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-6,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=workload.kv_cache_share,
            vllm_enable_sleep_mode=on_gpu,
            vllm_max_model_length=workload.prompt + workload.longest,
            bf16=True,
            use_cpu=not on_gpu,
            ddp_find_unused_parameters=False,  # TRL's default searches the graph in each backward pass
            optim="adamw_torch_fused",
            model_init_kwargs={"dtype": "bfloat16" if peft_config else "float32"},  # frozen weights as rlplug's
            max_steps=steps * len(variants),
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([json.loads(line) for line in prompts.read_text().splitlines()]),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[clock],
        peft_config=peft_config,
    )
    clock.trainer = trainer
    trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    print(f"# {trained / 1e6:.2f}M parameters train", file=sys.stderr, flush=True)
    trainer.train()


if __name__ == "__main__":
    name, folder, steps, *chosen_variants = sys.argv[1:]
    chosen, base = WORKLOADS[name], Path(folder)
    model_folder = prepare(chosen, base, with_weights=True)
    share_stop_rule(chosen)
    train(chosen, chosen_variants, model_folder, write_prompts(chosen, base), int(steps), base / "trl")
