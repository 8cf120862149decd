"""Keys that change a run's memory, in the order of what they cost, with the values that each can take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from rlplug.distributed.offload import OffloadMode
from rlplug_plan.inputs import MemoryInputs
from rlplug_plan.lever_effects import (
    LORA_RANK,
    adds,
    fused,
    in_place_of,
    kept_completions,
    passes_key,
    with_adapters,
    with_forward_passes,
    with_passes,
    with_traits,
)
from rlplug_plan.lever_values import (
    Values,
    engine_gpu_numbers,
    gpu_numbers,
    halves,
    has_adamw,
    if_added,
    recomputes_all,
    sequence_sizes,
    shares,
    smaller_critic_forward_passes,
    smaller_critic_passes,
    smaller_forward_passes,
    smaller_passes,
    tensor_sizes,
    traits_of_trained,
)
from rlplug_plan.resize import (
    ENGINE_OPTIONS,
    engine_rows,
    with_critic_budget,
    with_critic_forward_budget,
    with_engine_gpus,
    with_mesh,
    with_share,
)

LEAST_BUCKET: Final = 64
"""Smallest bucket of the weight sync that is proposed, in MiB."""
ADAMW_8BIT_BYTES: Final = 2 * (1 + 4 / 256)
"""Two bytes a parameter, and a float32 scale for each block of 256."""
OFFLOADS: Final[tuple[OffloadMode, ...]] = ("none", "optimizer", "optimizer_and_weights")
OPTIMIZATIONS: Final = "model.optimizations"
STRATEGY: Final = "trainer.strategy.init_args"


@dataclass(frozen=True)
class Lever:
    """One key of the configuration.

    Attributes:
        name: Its name among the levers; two may have one key.
        key: Where it is in the configuration.
        values: Returns the values that it can be set to, the mildest first.
        apply: Returns the run with one of them.
        cost: What it costs, in words; a function where that depends on the value.
        comes_first: Whether it changes the ranks or what trains, and with them the values of other keys.
        note: Returns what else to say of it, from the run before the change.
    """

    name: str
    key: Callable[[MemoryInputs], str] | str
    values: Callable[[MemoryInputs], Values]
    apply: Callable[[MemoryInputs, Any], MemoryInputs]
    cost: Callable[[MemoryInputs], str] | str
    comes_first: bool = False
    note: Callable[[MemoryInputs], str] = lambda _: ""

    def key_of(self, facts: MemoryInputs) -> str:
        return self.key if isinstance(self.key, str) else self.key(facts)

    def cost_of(self, facts: MemoryInputs) -> str:
        """Return what it costs in the run after the change."""
        return self.cost if isinstance(self.cost, str) else self.cost(facts)


LITTLE: Final[tuple[Lever, ...]] = (
    Lever(
        "bucket",
        "model.weight_sync.bucket_mib",
        lambda facts: halves(facts.bucket_bytes >> 20, LEAST_BUCKET),
        lambda facts, mib: replace(facts, bucket_bytes=mib << 20),
        "free: more messages in a weight sync",
    ),
    Lever(
        "sleep",
        "model.memory.sleep_between_rollouts",
        lambda facts: [True] if facts.engine_can_sleep and not facts.sleeps else [],
        lambda facts, _: replace(facts, sleeps=True),
        "0.16 s a step for 1.7B",
    ),
    Lever(
        "forward",
        lambda facts: f"{passes_key(facts)}_forward",
        smaller_forward_passes,
        with_forward_passes,
        "free: more, smaller forward passes",
    ),
    Lever(
        "critic forward",
        "model.critic.max_tokens_per_gpu_forward",
        smaller_critic_forward_passes,
        with_critic_forward_budget,
        "free: more, smaller forward passes of the critic",
    ),
    Lever(
        "spare share",
        lambda facts: f"{ENGINE_OPTIONS}.{facts.engine.share_key if facts.engine else ''}",
        lambda facts: shares(facts, holds_all=True),
        with_share,
        "free: the cache holds all completions of a step",
    ),
    Lever(
        "reshard",
        f"{STRATEGY}.reshard_after_forward",
        lambda facts: [] if facts.reshard_after_forward or facts.num_gpus == 1 else [True],
        lambda facts, _: replace(facts, reshard_after_forward=True),
        "an update took 1.08 of the time",
    ),
    Lever(
        "offload",
        "model.memory.offload",
        lambda facts: OFFLOADS[OFFLOADS.index(facts.offload) + 1 :] if facts.possible.offload else [],
        lambda facts, mode: replace(facts, offload=mode),
        "0.6 s a step for 13.5 GiB",
    ),
    Lever(
        "fused",
        OPTIMIZATIONS,
        lambda facts: if_added(
            facts, "FusedLogprobs", facts.policy.traits.logits_chunk is None or facts.policy.traits.keeps_logits
        ),
        fused,
        "no time: an update took 0.98 of it",
        note=lambda facts: ", with recompute: true" * facts.policy.traits.keeps_logits,
    ),
    Lever(
        "sync",
        f"{STRATEGY}.sync_every_micro_batch",
        lambda facts: [] if facts.sync_every_micro_batch or facts.shards == 1 else [True],
        lambda facts, _: replace(facts, sync_every_micro_batch=True),
        "gradients are reduced in each micro-batch",
    ),
    Lever(
        "share",
        lambda facts: f"{ENGINE_OPTIONS}.{facts.engine.share_key if facts.engine else ''}",
        lambda facts: shares(facts, holds_all=False),
        with_share,
        kept_completions,
    ),
    Lever(
        "rows",
        lambda facts: f"{ENGINE_OPTIONS}.{facts.engine.rows_key if facts.engine else ''}",
        lambda facts: [] if facts.engine is None else halves(facts.engine.rows, 1),
        engine_rows,
        "more batches in a rollout",
    ),
    Lever(
        "critic passes",
        "model.critic.max_tokens_per_gpu",
        smaller_critic_passes,
        with_critic_budget,
        "more, smaller passes of the critic",
    ),
    Lever(
        "passes",
        passes_key,
        smaller_passes,
        with_passes,
        "more, smaller passes",
    ),
    Lever(
        "engine GPUs",
        f"{ENGINE_OPTIONS}.tensor_parallel_size",
        engine_gpu_numbers,
        with_engine_gpus,
        "1.4 s more of generation with 8B on two GPUs",
        comes_first=True,
    ),
    Lever(
        "sequence",
        f"{STRATEGY}.sequence",
        sequence_sizes,
        lambda facts, size: with_mesh(facts, sequence=size),
        "60% of the matrix-product ceiling for 65% on four H200",
        comes_first=True,
    ),
    Lever(
        "selective",
        OPTIMIZATIONS,
        lambda facts: if_added(
            facts, "SelectiveCheckpointing", all(each.recompute == "nothing" for each in traits_of_trained(facts))
        ),
        adds("all_but_products"),
        "an update took 1.12 times as long",
    ),
    Lever(
        "checkpointing",
        OPTIMIZATIONS,
        lambda facts: if_added(facts, "GradientCheckpointing", not recomputes_all(facts)),
        adds("all"),
        "an update took 1.24 times as long",
        note=in_place_of,
    ),
    Lever(
        "tensor",
        f"{STRATEGY}.tensor",
        tensor_sizes,
        lambda facts, size: with_mesh(facts, tensor=size),
        "an update took 1.26 times as long",
        comes_first=True,
    ),
    Lever(
        "activations",
        OPTIMIZATIONS,
        lambda facts: if_added(
            facts, "ActivationOffload", not all(each.activations_on_host for each in traits_of_trained(facts))
        ),
        lambda facts, _: with_traits(facts, ("policy", "critic"), activations_on_host=True),
        "host memory; up to 2.7 times the update with GradientCheckpointing",
    ),
)
"""The run trains the same, on the same GPUs. Times: benchmarks/results, 2026-11-21-update-on-h200,
2026-11-21-step-on-h200 (sleep), 2026-11-23-titan-on-h200 (tensor), 2026-11-23-gpu-debts (activations)."""

TRAINING: Final[tuple[Lever, ...]] = (
    Lever(
        "8-bit",
        "model.optimizer.class_path",
        lambda facts: ["torchao.optim.AdamW8bit"] if has_adamw(facts) else [],
        lambda facts, _: replace(facts, policy=replace(facts.policy, state_bytes=ADAMW_8BIT_BYTES)),
        "other training: the optimizer's numbers are rounded to 8 bits",
        comes_first=True,
    ),
    Lever(
        "lora",
        "model.lora.rank",
        lambda facts: [LORA_RANK] if facts.possible.lora and facts.policy.adapters is None else [],
        with_adapters,
        "other training: adapters learn and the weights stay, with about ten times the learning rate",
        comes_first=True,
    ),
)
GPUS: Final = Lever(
    "GPUs",
    "GPUs (trainer.devices, trainer.num_nodes)",
    gpu_numbers,
    lambda facts, number: with_mesh(facts, times=number // facts.num_gpus),
    "more hardware",
    comes_first=True,
)
LEVERS: Final = (*LITTLE, *TRAINING, GPUS)
"""All of them: what costs least first."""
NAMES: Final = tuple(lever.name for lever in LEVERS)


def cost_of(name: str, facts: MemoryInputs) -> str:
    """Return what the lever of that name costs in the run after the change."""
    return next(lever.cost_of(facts) for lever in LEVERS if lever.name == name)
