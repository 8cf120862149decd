"""Keys that change a run's memory, in the order of what they cost, with the values that each can take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from rlplug.distributed.offload import OffloadMode
from rlplug_plan.inputs import MemoryInputs, ModelInputs
from rlplug_plan.resize import (
    ENGINE_OPTIONS,
    budget_steps,
    engine_rows,
    share_of,
    with_budget,
    with_engine_gpus,
    with_forward_budget,
    with_mesh,
    with_rows,
    with_share,
)

CHUNK: Final = 4096
"""Default of FusedLogprobs."""
LEAST_BUCKET: Final = 64
"""Smallest bucket of the weight sync that is proposed, in MiB."""
MOST_GPUS: Final = 64
"""Most GPUs that are tried, as a multiple of the run's."""
LORA_RANK: Final = 16
ADAMW_BYTES: Final = 8.0
ADAMW_8BIT_BYTES: Final = 2 * (1 + 4 / 256)
"""Two bytes a parameter, and a float32 scale for each block of 256."""
OFFLOADS: Final[tuple[OffloadMode, ...]] = ("none", "optimizer", "optimizer_and_weights")
OPTIMIZATIONS: Final = "model.optimizations"
STRATEGY: Final = "trainer.strategy.init_args"

Values: TypeAlias = Sequence[Any]


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


# ---- values -----------------------------------------------------------------------------------------------------


def _halves(value: int, least: int) -> list[int]:
    """Return half of ``value``, a quarter and so on, and ``least`` in the end."""
    halves = []
    while value > least:
        value = max(value // 2, least)
        halves.append(value)
    return halves


def _shares(facts: MemoryInputs, holds_all: bool) -> Values:
    """Return smaller shares, in hundredths, whose cache holds all completions of a step, or those that do not."""
    engine = facts.engine
    if engine is None or engine.least_kv_cache is None:
        return []
    sizes = (engine.kv_cache, engine.least_kv_cache, facts.wanted_kv_cache)
    now, least, enough = (share_of(facts, size) for size in sizes)
    hundredths = range(round(100 * now) - 1, round(100 * least) - 1, -1)
    return [value / 100 for value in hundredths if (value >= round(100 * enough)) is holds_all]


def _smaller_passes(facts: MemoryInputs) -> Values:
    sizes = facts.sizes
    if sizes.micro_batch_size is not None:
        return range(min(sizes.micro_batch_size, sizes.rows("update")) - 1, 0, -1)
    return budget_steps(sizes.least_budget, sizes.max_tokens["update"] - 1)


def _smaller_forward_passes(facts: MemoryInputs) -> Values:
    sizes = facts.sizes
    return [] if sizes.micro_batch_size else budget_steps(sizes.least_budget, sizes.max_tokens["forward"] - 1)


def _sequence_sizes(facts: MemoryInputs) -> Values:
    mesh, possible = facts.mesh, facts.possible
    if "sequence" not in possible.axes or not possible.heads:
        return []
    heads, kv_heads = possible.heads // mesh.tensor, possible.kv_heads // mesh.tensor
    sizes = [size for size in _divisors(mesh.shard * mesh.sequence) if size > mesh.sequence]
    return [size for size in sizes if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)]


def _tensor_sizes(facts: MemoryInputs) -> Values:
    mesh, possible = facts.mesh, facts.possible
    if "tensor" not in possible.axes or not possible.heads or facts.policy.adapters is not None:
        return []
    widths = (possible.heads, possible.kv_heads, facts.policy.whole.widths.mlp)
    sizes = [size for size in _divisors(mesh.shard * mesh.tensor) if size > mesh.tensor]
    return [size for size in sizes if not any(width % size for width in widths)]


def _gpu_numbers(facts: MemoryInputs) -> Values:
    """Return two times the GPUs, four times and so on, where prompts and mini-batch can be divided over them."""
    prompts, numbers, times = facts.possible.prompts_per_step, [], 2
    while times <= MOST_GPUS:
        number = times * facts.num_gpus
        fits_rows = times * facts.mesh.data_size <= max(facts.sizes.update_rows, facts.sizes.data_size)
        if prompts is None or (prompts % number == 0 and fits_rows):
            numbers.append(number)
        times *= 2
    return numbers


def _engine_sizes(facts: MemoryInputs) -> Values:
    engine, possible = facts.engine, facts.possible
    if engine is None or engine.least_kv_cache is None or not possible.larger_engines:
        return []
    sizes = [size for size in _divisors(facts.num_gpus) if size > facts.engine_gpus and size % facts.engine_gpus == 0]
    return [size for size in sizes if possible.kv_heads % size == 0 and possible.heads % size == 0]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


# ---- changes ----------------------------------------------------------------------------------------------------


def _of_networks(facts: MemoryInputs, change: Callable[[ModelInputs], ModelInputs], *names: str) -> MemoryInputs:
    networks = {name: getattr(facts, name) for name in names}
    changed: dict[str, Any] = {name: change(network) for name, network in networks.items() if network is not None}
    return replace(facts, **changed)


def _traits(facts: MemoryInputs, names: Sequence[str], **traits: Any) -> MemoryInputs:
    return _of_networks(facts, lambda network: replace(network, traits=replace(network.traits, **traits)), *names)


def _fused(facts: MemoryInputs, _: Any) -> MemoryInputs:
    chunk = facts.policy.traits.logits_chunk or CHUNK
    return _traits(facts, ("policy", "reference"), logits_chunk=chunk, keeps_logits=False)


def _with_adapters(facts: MemoryInputs, _: Any) -> MemoryInputs:
    """Return the run with adapters on all linear layers of blocks; the policy without them is the reference."""
    shape = facts.policy.whole
    (query, key, mlp), hidden = shape.widths, shape.hidden
    per_block = 2 * (hidden + query) + 2 * (hidden + key) + 3 * (hidden + mlp)
    adapters = LORA_RANK * shape.num_blocks * per_block
    return replace(facts, policy=replace(facts.policy, adapters=adapters), reference=None)


def _kept_completions(facts: MemoryInputs) -> str:
    engine = facts.engine
    assert engine is not None
    held = engine.kv_cache // max(1, facts.sizes.longest * engine.kv_bytes_per_token)
    return f"the cache holds {held} of a step's {facts.completions} completions at once"


def _if_added(facts: MemoryInputs, name: str, saves_more: bool) -> Values:
    return [name] if name in facts.possible.optimizations and saves_more else []


def _adds(recompute: str) -> Callable[[MemoryInputs, Any], MemoryInputs]:
    return lambda facts, _: _traits(facts, ("policy", "critic"), recompute=recompute, recompute_every=1)


def _recomputes_all(facts: MemoryInputs) -> bool:
    return facts.policy.traits.recompute == "all" and facts.policy.traits.recompute_every == 1


def _in_place_of(facts: MemoryInputs) -> str:
    return ", in place of SelectiveCheckpointing" * (facts.policy.traits.recompute == "all_but_products")


def _with_passes(facts: MemoryInputs, size: int) -> MemoryInputs:
    return with_budget(facts, size) if facts.sizes.micro_batch_size is None else with_rows(facts, size)


LITTLE: Final[tuple[Lever, ...]] = (
    Lever(
        "bucket",
        "model.weight_sync.bucket_mib",
        lambda facts: _halves(facts.bucket_bytes >> 20, LEAST_BUCKET),
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
        "model.batch.max_tokens_per_gpu_forward",
        _smaller_forward_passes,
        with_forward_budget,
        "free: more, smaller forward passes",
    ),
    Lever(
        "spare share",
        lambda facts: f"{ENGINE_OPTIONS}.{facts.engine.share_key if facts.engine else ''}",
        lambda facts: _shares(facts, holds_all=True),
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
        lambda facts: OFFLOADS[OFFLOADS.index(facts.offload) + 1 :],
        lambda facts, mode: replace(facts, offload=mode),
        "0.6 s a step for 13.5 GiB",
    ),
    Lever(
        "fused",
        OPTIMIZATIONS,
        lambda facts: _if_added(
            facts, "FusedLogprobs", facts.policy.traits.logits_chunk is None or facts.policy.traits.keeps_logits
        ),
        _fused,
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
        lambda facts: _shares(facts, holds_all=False),
        with_share,
        _kept_completions,
    ),
    Lever(
        "rows",
        lambda facts: f"{ENGINE_OPTIONS}.{facts.engine.rows_key if facts.engine else ''}",
        lambda facts: [] if facts.engine is None else _halves(facts.engine.rows, 1),
        engine_rows,
        "more batches in a rollout",
    ),
    Lever(
        "passes",
        lambda facts: (
            "model.batch."
            + ("max_tokens_per_gpu" if facts.sizes.micro_batch_size is None else "micro_batch_size_per_gpu")
        ),
        _smaller_passes,
        _with_passes,
        "more, smaller passes",
    ),
    Lever(
        "engine GPUs",
        f"{ENGINE_OPTIONS}.tensor_parallel_size",
        _engine_sizes,
        with_engine_gpus,
        "1.4 s more of generation with 8B on two GPUs",
        comes_first=True,
    ),
    Lever(
        "sequence",
        f"{STRATEGY}.sequence",
        _sequence_sizes,
        lambda facts, size: with_mesh(facts, sequence=size),
        "60% of the matrix-product ceiling for 65% on four H200",
        comes_first=True,
    ),
    Lever(
        "selective",
        OPTIMIZATIONS,
        lambda facts: _if_added(facts, "SelectiveCheckpointing", facts.policy.traits.recompute == "nothing"),
        _adds("all_but_products"),
        "an update took 1.12 times as long",
    ),
    Lever(
        "checkpointing",
        OPTIMIZATIONS,
        lambda facts: _if_added(facts, "GradientCheckpointing", not _recomputes_all(facts)),
        _adds("all"),
        "an update took 1.24 times as long",
        note=_in_place_of,
    ),
    Lever(
        "tensor",
        f"{STRATEGY}.tensor",
        _tensor_sizes,
        lambda facts, size: with_mesh(facts, tensor=size),
        "an update took 1.26 times as long",
        comes_first=True,
    ),
    Lever(
        "activations",
        OPTIMIZATIONS,
        lambda facts: _if_added(facts, "ActivationOffload", not facts.policy.traits.activations_on_host),
        lambda facts, _: _traits(facts, ("policy", "critic"), activations_on_host=True),
        "host memory; up to 2.7 times the update with GradientCheckpointing",
    ),
)
"""The run trains the same, on the same GPUs. Times: benchmarks/results, 2026-11-21-update-on-h200,
2026-11-21-step-on-h200 (sleep), 2026-11-23-titan-on-h200 (tensor), 2026-11-23-gpu-debts (activations)."""

TRAINING: Final[tuple[Lever, ...]] = (
    Lever(
        "8-bit",
        "model.optimizer.class_path",
        lambda facts: ["torchao.optim.AdamW8bit"] if _has_adamw(facts) else [],
        lambda facts, _: replace(facts, policy=replace(facts.policy, state_bytes=ADAMW_8BIT_BYTES)),
        "other training: the optimizer's numbers are rounded to 8 bits",
        comes_first=True,
    ),
    Lever(
        "lora",
        "model.lora.rank",
        lambda facts: [LORA_RANK] if facts.possible.lora and facts.policy.adapters is None else [],
        _with_adapters,
        "other training: adapters learn and the weights stay, with about ten times the learning rate",
        comes_first=True,
    ),
)
GPUS: Final = Lever(
    "GPUs",
    "GPUs (trainer.devices, trainer.num_nodes)",
    _gpu_numbers,
    lambda facts, number: with_mesh(facts, times=number // facts.num_gpus),
    "more hardware",
    comes_first=True,
)
LEVERS: Final = (*LITTLE, *TRAINING, GPUS)
"""All of them: what costs least first."""
NAMES: Final = tuple(lever.name for lever in LEVERS)


def _has_adamw(facts: MemoryInputs) -> bool:
    return facts.possible.adamw_8bit and facts.policy.adapters is None and facts.policy.state_bytes == ADAMW_BYTES
