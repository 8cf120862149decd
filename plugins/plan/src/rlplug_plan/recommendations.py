"""Recommendations of the memory plan, which fit together: the engine's sleep, GPUs and share, budgets, and offload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rlplug.training.batch_plan import PassKind
from rlplug.types import GIB
from rlplug_plan.engine_sizes import engine_sizes
from rlplug_plan.inputs import MemoryInputs
from rlplug_plan.levers import GPUS, OFFLOADS, TRAINING, cost_of
from rlplug_plan.own_engine import own_engine_recommendations
from rlplug_plan.plan import MemoryPlan
from rlplug_plan.recommendation import Recommendation
from rlplug_plan.remedies import find_remedies
from rlplug_plan.resize import (
    BUDGET_STEP,
    ENGINE_OPTIONS,
    share_of,
    with_budget,
    with_critic_budget,
    with_critic_forward_budget,
    with_engine_gpus,
    with_forward_budget,
    with_forward_rows,
    with_rows,
    with_share,
)

GAIN: Final = 1.1
"""How much larger a cache or a pass must become for an engine that sleeps, or more offload, to be recommended."""
SLEEP: Final = "model.memory.sleep_between_rollouts"
PHASES: Final[tuple[PassKind, ...]] = ("update", "forward")
OTHER_KINDS: Final = frozenset(lever.name for lever in (*TRAINING, GPUS))


@dataclass(frozen=True)
class Tuned:
    """A run with the largest sizes that fit together, with an engine that sleeps or does not."""

    facts: MemoryInputs
    holds: float
    """Share of the completions of a step that the engine's cache holds at once; 1 where its size is not an option."""
    has_room: bool
    """Whether any share leaves room for the trainer and one sequence."""

    @property
    def size(self) -> int:
        """Tokens of an update pass, or rows."""
        sizes = self.facts.sizes
        return sizes.max_tokens["update"] if sizes.micro_batch_size is None else sizes.micro_batch_size

    def is_better(self, other: Tuned) -> bool:
        """Return whether the cache or the passes are larger by a tenth than the other's, and neither is smaller."""
        pairs = ((self.holds, other.holds), (self.size, other.size))
        return all(mine >= others for mine, others in pairs) and any(mine >= GAIN * others for mine, others in pairs)


def recommendations(facts: MemoryInputs) -> list[Recommendation]:
    """Return what can be chosen, for a run that fits, or for one after the smallest change that makes it fit.

    All values fit together. There is none where nothing fits, or only with other training or more GPUs, but for an
    engine with GPUs of its own.
    """
    own = [] if facts.own_engine is None else own_engine_recommendations(facts.own_engine)
    base = _fitting(facts)
    if base is None:
        return own
    tuned = first = _tuned(base)
    for sleeps in (False, True) if base.engine_can_sleep and not base.sleeps else (base.sleeps,):
        more = OFFLOADS[OFFLOADS.index(base.offload) + 1 :] if base.possible.offload else ()
        for mode in (base.offload, *more):  # the cheapest first
            changed = _tuned(replace(base, sleeps=sleeps, offload=mode))
            tuned = changed if changed.is_better(tuned) else tuned
    found = [] if tuned.facts.sleeps == base.sleeps else [_sleep(first)]
    sizes = engine_sizes(tuned.facts) if tuned.has_room else []
    passes = _passes(base, tuned.facts)
    return [*found, *_engine(base, tuned), *sizes, *own, *passes, _offload(base, tuned.facts)]


def _fitting(facts: MemoryInputs) -> MemoryInputs | None:
    if MemoryPlan(facts).fits:
        return facts
    first = next(iter(find_remedies(facts)), None)
    if first is None or OTHER_KINDS & {setting.name for setting in first.settings}:
        return None
    return first.facts if MemoryPlan(first.facts).fits else None


def _tuned(facts: MemoryInputs) -> Tuned:
    """Return the run with fewer GPUs an engine where they hold as much, then the share, then passes as large as fit."""
    facts = _smallest_engine(facts)
    facts, has_room = _with_share(facts)
    if has_room:
        facts = _with_passes(facts)
        facts = _with_critic(_with_forward(facts))
    holds = 1.0
    if facts.engine is not None and facts.wanted_kv_cache:
        holds = min(1.0, facts.engine.kv_cache / facts.wanted_kv_cache)
    return Tuned(facts, holds, has_room)


# ---- the engine ---------------------------------------------------------------------------------------------------


def _smallest_engine(facts: MemoryInputs) -> MemoryInputs:
    if facts.engine is None or facts.engine.least_kv_cache is None:
        return facts
    for number in range(1, facts.engine_gpus):
        if facts.engine_gpus % number == 0:
            changed = with_engine_gpus(facts, number)
            share = share_of(changed, changed.wanted_kv_cache)
            if share <= 1 and MemoryPlan(with_share(changed, share)).fits:
                return changed
    return facts


def _with_share(facts: MemoryInputs) -> tuple[MemoryInputs, bool]:
    """Return the run with a cache that holds all completions, or the largest that fits, and whether one does."""
    engine = facts.engine
    if engine is None or engine.least_kv_cache is None:
        return facts, True
    most = min(100, round(100 * share_of(facts, facts.wanted_kv_cache)))
    least = round(100 * share_of(facts, engine.least_kv_cache))
    for hundredths in range(most, least - 1, -1):
        changed = with_share(facts, hundredths / 100)
        if MemoryPlan(changed).fits:
            return changed, True
    return facts, False


def _sleep(awake: Tuned) -> Recommendation:
    held = f"a cache for {awake.holds:.0%} of a step's completions and " if awake.facts.wanted_kv_cache else ""
    unit = "tokens" if awake.facts.sizes.micro_batch_size is None else "completions"
    return Recommendation(
        SLEEP, True, f"true, for what follows; awake, {held}{awake.size:,} {unit} a pass are the most"
    )


def _engine(before: MemoryInputs, tuned: Tuned) -> list[Recommendation]:
    after, engine, found = tuned.facts, tuned.facts.engine, []
    if engine is None or engine.least_kv_cache is None:
        return []
    if after.engine_gpus < before.engine_gpus:
        size, key = after.engine_gpus, f"{ENGINE_OPTIONS}.tensor_parallel_size"
        cost = cost_of("engine GPUs", after)
        found.append(Recommendation(key, size, f"{size} fits; {before.engine_gpus} took {cost}"))
    key, share = f"{ENGINE_OPTIONS}.{engine.share_key}", share_of(after, engine.kv_cache)
    if not tuned.has_room:
        return [*found, Recommendation(key, None, "no share leaves room for the trainer and one sequence")]
    cached = f"its KV cache of {engine.kv_cache / GIB:.1f} GiB holds"
    used = after.wanted_kv_cache / engine.kv_cache
    if used > 1:
        held = f"{int(after.completions / used)} of a step's {after.completions} completions at once"
        return [*found, Recommendation(key, share, f"{share:.2f}, the most that fits; {cached} {held}")]
    awake = after.sleeps and before.sleeps and MemoryPlan(replace(after, sleeps=False)).fits
    rest = ", and the engine need not sleep" * awake
    says = f"{share:.2f}; {cached} all {after.completions} completions of a step, which use {used:.0%}{rest}"
    return [*found, Recommendation(key, share, says)]


# ---- passes and offload ---------------------------------------------------------------------------------------------


def _with_passes(facts: MemoryInputs) -> MemoryInputs:
    """Return the run with the largest update passes that fit, up to a mini-batch in one."""
    sizes = facts.sizes
    if sizes.micro_batch_size is not None:
        return _largest(facts, range(sizes.micro_batch_size, sizes.rows("update") + 1), with_rows)
    most = sizes.rows("update") * sizes.longest // sizes.sequence_size
    return _largest(facts, _budgets(sizes.max_tokens["update"], most), with_budget)


def _with_forward(facts: MemoryInputs) -> MemoryInputs:
    sizes = facts.sizes
    if not (facts.logprobs_every_step or facts.reference is not None or facts.critic is not None):
        return facts
    if sizes.micro_batch_size is not None:
        return _largest(facts, range(sizes.rows_per_pass("forward"), sizes.rows("forward") + 1), with_forward_rows)
    most = sizes.rows("forward") * sizes.longest // sizes.sequence_size
    budgets = _budgets(sizes.max_tokens["forward"], most)
    return _largest(facts, budgets, with_forward_budget)


def _with_critic(facts: MemoryInputs) -> MemoryInputs:
    sizes = facts.sizes
    if facts.critic is None or sizes.micro_batch_size is not None:
        return facts
    most = {phase: sizes.rows(phase) * sizes.longest // sizes.sequence_size for phase in PHASES}
    facts = _largest(facts, _budgets(sizes.of_critic.max_tokens["update"], most["update"]), with_critic_budget)
    budgets = _budgets(facts.sizes.of_critic.max_tokens["forward"], most["forward"])
    return _largest(facts, budgets, with_critic_forward_budget)


def _budgets(now: int, most: int) -> Sequence[int]:
    """Return the multiples of 1,024 above ``now``, until all rows are in one pass."""
    return range((now // BUDGET_STEP + 1) * BUDGET_STEP, -(-most // BUDGET_STEP) * BUDGET_STEP + 1, BUDGET_STEP)


def _largest(
    facts: MemoryInputs, values: Sequence[int], change: Callable[[MemoryInputs, int], MemoryInputs]
) -> MemoryInputs:
    """Return the run with the largest of rising ``values`` that fits; as it is where none does."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high + 1) // 2
        if MemoryPlan(change(facts, values[middle - 1])).fits:
            low = middle
        else:
            high = middle - 1
    return change(facts, values[low - 1]) if low else facts


def _passes(before: MemoryInputs, after: MemoryInputs) -> list[Recommendation]:
    sizes = after.sizes
    whole = ", a mini-batch in one pass" * (not sizes.needs_several_passes("update"))
    if sizes.micro_batch_size is not None:
        key, size = "model.batch.micro_batch_size_per_gpu", sizes.micro_batch_size
        found = [Recommendation(key, size, f"up to {size}{whole}")]
        if (forward := sizes.rows_per_pass("forward")) > size:
            found.append(Recommendation(f"{key}_forward", forward, f"up to {forward}, where nothing is trained"))
        return found
    update, forward = sizes.max_tokens["update"], sizes.max_tokens["forward"]
    usual = "; twice the longest sequence is usual" * (before.sizes.max_tokens["update"] < 2 * sizes.least_budget)
    found = [Recommendation("model.batch.max_tokens_per_gpu", update, f"up to {update}{whole}{usual}")]
    if forward > 2 * update:
        left = MemoryPlan(with_budget(replace(before, sizes=replace(sizes, forward_is_set=False)), update))
        says = (
            f"up to {forward}; with {2 * update}, {left.headroom('logprobs') / GIB:.0f} GiB stay free in those passes"
        )
        found.append(Recommendation("model.batch.max_tokens_per_gpu_forward", forward, says))
    if (own := sizes.critic_tokens) is not None:
        says = f"up to {own}; its passes have no logits"
        found.append(Recommendation("model.critic.max_tokens_per_gpu", own, says))
    if (own := sizes.critic_tokens_forward) is not None:
        says = f"up to {own}; nothing is kept of its passes then"
        found.append(Recommendation("model.critic.max_tokens_per_gpu_forward", own, says))
    return found


def _offload(before: MemoryInputs, after: MemoryInputs) -> Recommendation:
    mode = next(mode for mode in OFFLOADS if MemoryPlan(replace(after, offload=mode)).fits or mode == after.offload)
    says: str = mode
    if mode != before.offload:
        says += " is enough" if OFFLOADS.index(mode) < OFFLOADS.index(before.offload) else ", for what is above"
    return Recommendation("model.memory.offload", mode, says)
