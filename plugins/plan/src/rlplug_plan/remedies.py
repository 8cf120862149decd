"""Changes that make a plan fit: the smallest change, and the largest sizes that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from rlplug.distributed.offload import OffloadMode
from rlplug.interfaces.memory import EngineMemory
from rlplug.interfaces.memory_plan import RESERVE_SHARE
from rlplug.types import GIB
from rlplug_plan.inputs import MemoryInputs, ModelInputs
from rlplug_plan.plan import MemoryPlan

CHUNK: Final = 4096
"""Default of FusedLogprobs."""
SMALL_SHARE: Final = 0.25
"""Share of the reserve that a run may lack before more than one change is proposed."""
LEAST_BUCKET: Final = 64 << 20
"""Smallest bucket of the weight sync that is proposed, in bytes."""
MOST_GPUS: Final = 64
"""Most GPUs that are tried, as a multiple of the run's."""
OFFLOADS: Final[tuple[OffloadMode, ...]] = ("none", "optimizer", "optimizer_and_weights")
ENGINE_OPTIONS: Final = "model.rollout.init_args"


@dataclass(frozen=True)
class Change:
    """A key and its new value, in words, and the run after that."""

    text: str
    facts: MemoryInputs


Remedy: TypeAlias = Callable[[MemoryInputs], Iterator[Change]]
"""Yields what it can change, the mildest first."""


def smallest_change(facts: MemoryInputs, may_try: bool = True) -> list[str]:
    """Return what to set so that the plan fits: one thing if one is enough, else as few as possible; or nothing.

    Remedies are tried in the order of what they cost, alone and then together; only the last asks for more GPUs. Before
    several of them a person would try the run as it is, if little is missing of what the plan holds in reserve.

    Args:
        facts: The run, which does not fit.
        may_try: Whether that may be proposed: not of a run that was tried.
    """
    for remedy in REMEDIES:
        for change in remedy(facts):
            if MemoryPlan(change.facts).fits:
                return [change.text]
    missing = -MemoryPlan(facts).headroom(MemoryPlan(facts).tightest)
    reserve = int(RESERVE_SHARE * facts.gpu.total)
    if may_try and missing <= SMALL_SHARE * reserve:
        return [
            f"model.memory.on_shortfall: warn, since {missing / GIB:.2f} GiB are missing and the plan holds "
            f"{reserve / GIB:.2f} in reserve"
        ]
    return _together(facts, REMEDIES) or _together(facts, (*REMEDIES, more_gpus))


def _together(facts: MemoryInputs, remedies: Sequence[Remedy]) -> list[str]:
    """Apply all remedies, but for those without which it fits as well, on as many GPUs; nothing when all fall short."""
    chosen, texts = list(remedies), _applied(facts, remedies)
    if texts is None:
        return []
    for remedy in reversed(remedies):  # what costs most goes first
        fewer = [other for other in chosen if other is not remedy]
        found = _applied(facts, fewer)
        if found is not None and (more_gpus not in remedies or found[-1] == texts[-1]):
            chosen, texts = fewer, found
    return texts


def _applied(facts: MemoryInputs, remedies: Sequence[Remedy]) -> list[str] | None:
    """Apply each at its strongest, the last at the mildest that fits; ``None`` when all together are too little."""
    texts: list[str] = []
    for remedy in remedies:
        strongest: Change | None = None
        for strongest in remedy(facts):
            if MemoryPlan(strongest.facts).fits:
                return [*texts, strongest.text]
        if strongest is not None:
            texts.append(strongest.text)
            facts = strongest.facts
    return None


# ---- in the order of what they cost ---------------------------------------------------------------------------------


def smaller_buckets(facts: MemoryInputs) -> Iterator[Change]:
    for num_bytes in _halves(facts.bucket_bytes, LEAST_BUCKET):
        yield Change(f"model.weight_sync.bucket_mib: {num_bytes >> 20}", replace(facts, bucket_bytes=num_bytes))


def sleep(facts: MemoryInputs) -> Iterator[Change]:
    if facts.engine_can_sleep and not facts.sleeps:
        yield Change("model.memory.sleep_between_rollouts: true", replace(facts, sleeps=True))


def offload(facts: MemoryInputs) -> Iterator[Change]:
    for mode in OFFLOADS[OFFLOADS.index(facts.offload) + 1 :]:
        yield Change(f"model.memory.offload: {mode}", replace(facts, offload=mode))


def fused_logprobs(facts: MemoryInputs) -> Iterator[Change]:
    traits = facts.policy.traits
    if traits.logits_chunk is not None and not traits.keeps_logits:
        return

    def fused(network: ModelInputs) -> ModelInputs:
        chunk = network.traits.logits_chunk or CHUNK
        return replace(network, traits=replace(network.traits, logits_chunk=chunk, keeps_logits=False))

    reference = None if facts.reference is None else fused(facts.reference)
    changed = replace(facts, policy=fused(facts.policy), reference=reference)
    yield Change(f"FusedLogprobs in model.optimizations{', with recompute: true' * traits.keeps_logits}", changed)


def smaller_engine(facts: MemoryInputs) -> Iterator[Change]:
    engine = facts.engine
    if engine is None or engine.least_kv_cache is None or engine.kv_cache <= engine.least_kv_cache:
        return
    missing = -MemoryPlan(facts).headroom(MemoryPlan(facts).tightest)
    for kv_cache in (engine.kv_cache - missing, engine.least_kv_cache):
        share = _share(facts, engine, kv_cache)
        changed = with_share(facts, share)
        assert changed.engine is not None
        if engine.least_kv_cache <= changed.engine.kv_cache < engine.kv_cache:
            yield Change(f"{ENGINE_OPTIONS}.{engine.share_key}: {share:.2f}", changed)


def fewer_rows(facts: MemoryInputs) -> Iterator[Change]:
    engine = facts.engine
    if engine is None:
        return
    for rows in _halves(engine.rows, 1):
        sizes = {name: getattr(engine, name) * rows // engine.rows for name in ("kv_cache", "other")}
        changed = replace(facts, engine=replace(engine, rows=rows, **sizes))
        yield Change(f"{ENGINE_OPTIONS}.{engine.rows_key}: {rows}", changed)


def smaller_passes(facts: MemoryInputs) -> Iterator[Change]:
    sizes = facts.sizes
    if sizes.micro_batch_size is not None:
        for number in _halves(sizes.micro_batch_size, 1):
            changed = replace(facts, sizes=replace(sizes, micro_batch_size=number))
            yield Change(f"model.batch.micro_batch_size_per_gpu: {number}", changed)
        return
    for budget in _halves(sizes.max_tokens["update"], -(-sizes.longest // sizes.sequence_size)):
        yield Change(f"model.batch.max_tokens_per_gpu: {budget}", with_budget(facts, budget))


def checkpointing(facts: MemoryInputs) -> Iterator[Change]:
    if facts.policy.traits.recompute == "all" and facts.policy.traits.recompute_every == 1:
        return

    def recomputed(network: ModelInputs) -> ModelInputs:
        return replace(network, traits=replace(network.traits, recompute="all", recompute_every=1))

    critic = None if facts.critic is None else recomputed(facts.critic)
    name = "GradientCheckpointing in model.optimizations"
    if facts.policy.traits.recompute == "all_but_products":
        name += ", in place of SelectiveCheckpointing"
    yield Change(name, replace(facts, policy=recomputed(facts.policy), critic=critic))


def more_gpus(facts: MemoryInputs) -> Iterator[Change]:
    """Split weights and rows over more ranks; an engine of several GPUs stays one."""
    times = 2
    while times <= MOST_GPUS:
        sizes = facts.sizes
        rows = {name: -(-getattr(sizes, name) // times) for name in ("update_rows", "forward_rows")}
        changed = replace(
            facts, num_gpus=times * facts.num_gpus, shards=times * facts.shards, sizes=replace(sizes, **rows)
        )
        yield Change(f"{changed.num_gpus} GPUs (trainer.devices, trainer.num_nodes)", changed)
        times *= 2


REMEDIES: Final[tuple[Remedy, ...]] = (
    smaller_buckets,
    sleep,
    offload,
    fused_logprobs,
    smaller_engine,
    fewer_rows,
    smaller_passes,
    checkpointing,
)


# ---- sizes ----------------------------------------------------------------------------------------------------------


def with_share(facts: MemoryInputs, share: float) -> MemoryInputs:
    """Return the run with another share of the GPU for the engine."""
    assert facts.engine is not None
    kv_cache = int(share * facts.gpu.total) - facts.engine.share_base
    return replace(facts, engine=replace(facts.engine, kv_cache=kv_cache))


def with_budget(facts: MemoryInputs, budget: int) -> MemoryInputs:
    """Return the run with another ``max_tokens_per_gpu``, and twice that in forward-only passes, as by default."""
    return replace(facts, sizes=replace(facts.sizes, max_tokens={"update": budget, "forward": 2 * budget}))


def _share(facts: MemoryInputs, engine: EngineMemory, kv_cache: int) -> float:
    """Return the share in hundredths, rounded down unless the cache would be too small."""
    least = engine.least_kv_cache or 0
    hundredths = 100 * (engine.share_base + max(kv_cache, least)) / facts.gpu.total
    return (int(hundredths) + (kv_cache <= least)) / 100


def _halves(value: int, least: int) -> Iterator[int]:
    """Yield half of ``value``, a quarter and so on, and ``least`` in the end."""
    while value > least:
        value = max(value // 2, least)
        yield value
