"""The tables of keys: each key of ours exists, and each of verl's tuning pages has an entry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning
import pytest
import torch
from jsonargparse import ArgumentParser
from rlplug_algos.corrections import Correction
from rlplug_data.hf_datasets import HFDatasetSource
from rlplug_migrate.frameworks import FRAMEWORKS
from rlplug_migrate.keys import Framework
from rlplug_migrate.report import keys_table
from rlplug_migrate.verl.names import ACTOR, FSDP, MODEL, ROLLOUT

from rlplug.cli.configuration.early_checks import known_keys
from rlplug.data.sources import FileSource
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.interfaces import ModelConfig
from rlplug.models.critic import CriticConfig
from rlplug.models.lora.config import LoRAConfig
from rlplug.plugin_manager import plugins
from rlplug.training.validation.config import ValidationSampling

TUNING = (
    *(f"{ROLLOUT}.{name}" for name in ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "n")),
    *(f"{ROLLOUT}.{name}" for name in ("tensor_model_parallel_size", "temperature", "top_p", "free_cache_engine")),
    *(f"{ROLLOUT}.{name}" for name in ("log_prob_max_token_len_per_gpu", "multi_turn.enable", "enforce_eager")),
    *(f"{ACTOR}.{name}" for name in ("ulysses_sequence_parallel_size", "use_dynamic_bsz", "ppo_max_token_len_per_gpu")),
    *(f"{ACTOR}.{name}" for name in ("entropy_from_logits_with_chunking", "entropy_checkpointing", "clip_ratio_low")),
    *(
        f"{ACTOR}.{name}"
        for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type", "clip_ratio_high", "loss_agg_mode")
    ),
    *(
        f"{ACTOR}.{name}"
        for name in ("profiler.enable", "use_torch_compile", "ppo_micro_batch_size_per_gpu", "grad_clip")
    ),
    *(f"{FSDP}.{name}" for name in ("forward_prefetch", "param_offload", "optimizer_offload", "fsdp_size")),
    *(f"{MODEL}.{name}" for name in ("enable_gradient_checkpointing", "enable_activation_offload", "use_liger")),
    *(f"{MODEL}.{name}" for name in ("use_fused_kernels", "use_remove_padding", "lora_rank")),
    *(f"trainer.{name}" for name in ("save_freq", "test_freq", "nnodes", "n_gpus_per_node", "total_epochs", "logger")),
    *(
        "algorithm.use_kl_in_reward",
        "data.filter_overlong_prompts",
        "custom_reward_function.path",
        "global_profiler.steps",
    ),
)
"""Keys of verl's pages on performance and of its examples."""


def options_of(*classes: Any) -> set[str]:
    """Return the names of all options, those that a class passes on to another one too."""
    parsers = [ArgumentParser(exit_on_error=False) for _ in classes]
    return {
        name.partition(".")[0]
        for parser, each in zip(parsers, classes, strict=True)
        for name in parser.add_class_arguments(each, fail_untyped=False)
    }


@pytest.fixture(scope="module")
def ours() -> dict[str, set[str]]:
    """Names in each of our blocks, those of classes included."""
    registry = plugins().registry
    blocks = {block: set(names) for block, names in known_keys().items()}
    blocks["model.algorithm.init_args"] = options_of(*registry.each("algorithms"))
    blocks["model.algorithm.init_args.correction"] = options_of(Correction)
    blocks["model.rollout.init_args"] = options_of(*registry.each("rollouts"))
    blocks["model.optimizer.init_args"] = blocks["model.critic.optimizer.init_args"] = options_of(torch.optim.AdamW)
    blocks["model.lr_scheduler.init_args"] = options_of(torch.optim.lr_scheduler.CosineAnnealingLR)
    blocks["model.critic"] = options_of(CriticConfig)
    blocks["model.critic.trunk"] = options_of(ModelConfig)
    blocks["model.lora"] = options_of(LoRAConfig)
    blocks["model.validation.sampling"] = options_of(ValidationSampling)
    blocks["trainer"] = options_of(lightning.Trainer)
    blocks["trainer.strategy.init_args"] = options_of(RLFSDP2Strategy)
    blocks["data.train.init_args"] = blocks["data.val.init_args"] = options_of(FileSource, HFDatasetSource)
    blocks[""] = {"seed_everything", *(block for block in blocks if "." not in block)}
    return blocks


def targets(framework: Framework) -> Iterator[tuple[str, str, str]]:
    """Yield a key, what it becomes, and the class or option behind a colon."""
    for key in framework.keys:
        target, _, rest = key.to.partition(": ")
        yield from ((key.name, each, rest) for each in (target.split(", ") if target else ()))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_each_of_our_keys_in_a_table_exists(ours: dict[str, set[str]], name: str) -> None:
    registered = {
        each for kind in ("algorithms", "optimizations", "rewards") for each in plugins().registry.names(kind)
    }
    wrong = []
    for key, target, rest in targets(FRAMEWORKS[name]):
        block, _, option = target.rpartition(".")
        if option != "class_path" and option not in ours.get(block, set()):
            wrong.append((key, target))
        if rest[:1].isupper() and rest.partition(",")[0] not in registered:
            wrong.append((key, rest))
    assert not wrong


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_each_key_without_a_counterpart_has_a_reason(name: str) -> None:
    assert not [key.name for key in FRAMEWORKS[name].keys if not (key.to or key.note)]
    names = [key.name for key in FRAMEWORKS[name].keys]
    assert len(names) == len(set(names)), "a second row is never read"


@pytest.mark.parametrize("name", TUNING)
def test_a_key_of_verls_pages_is_in_the_table(name: str) -> None:
    key = FRAMEWORKS["verl"].find(name)
    assert key is not None
    assert key.note != "not there", "a catch-all row: say what to do"


def test_the_table_has_every_key_once() -> None:
    table = keys_table(FRAMEWORKS["verl"])
    rows = [line for line in table.splitlines() if line.startswith("`")]
    assert len(rows) == len(FRAMEWORKS["verl"].keys)
    assert all(line.count(" | ") == 2 for line in rows)
    assert "`actor_rollout_ref.rollout.n` | `model.batch.group_size` | default 1" in rows
