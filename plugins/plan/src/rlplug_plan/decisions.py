"""Decisions of the memory plan: whether the engine sleeps, and which optional optimizations a run needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from rlplug.errors import ConfigError
from rlplug.interfaces.optimization import Effect, Optimization
from rlplug.types import GIB
from rlplug_plan.inputs import MemoryInputs
from rlplug_plan.own_engine import own_engine_shortfall
from rlplug_plan.plan import CUDA, ENGINE, PHASES, MemoryPlan
from rlplug_plan.remedies import alternatives, find_remedies

NUM_LARGEST: Final = 3
SleepSetting: TypeAlias = bool | Literal["auto"]


@dataclass(frozen=True)
class Decisions:
    """A memory plan and its decisions."""

    plan: MemoryPlan
    why: str
    """Why the engine sleeps or stays awake; empty for an engine that cannot sleep."""
    kept: tuple[Optimization, ...]
    left_out: tuple[Effect, ...]


def decide(
    optimizations: Sequence[Optimization],
    sleep: SleepSetting,
    facts_with: Callable[[Sequence[Optimization]], MemoryInputs],
) -> Decisions:
    """Plan with as few optional optimizations as fit, in the order of the list.

    An engine that sleeps costs less time than blocks that are computed twice, so it sleeps first.

    Args:
        optimizations: Optimizations of the run.
        sleep: ``model.memory.sleep_between_rollouts``.
        facts_with: Returns the run with some of them, and an engine that stays awake.
    """
    optional = [optimization for optimization in optimizations if optimization.only_if_needed]
    for num_needed in range(len(optional) + 1):
        left_out = optional[num_needed:]
        kept = tuple(optimization for optimization in optimizations if optimization not in left_out)
        plan, why = _with_sleep(facts_with(kept), sleep)
        if plan.fits:
            break
    used, total = plan.need(plan.tightest), plan.facts.gpu.total
    effects = [
        Effect(
            f"{type(optimization).__name__} left out: the plan fits without it, {used / GIB:.0f} of "
            f"{total / GIB:.0f} GiB"
        )
        for optimization in left_out
    ]
    return Decisions(plan, why, kept, tuple(effects))


def _with_sleep(facts: MemoryInputs, sleep: SleepSetting) -> tuple[MemoryPlan, str]:
    """Let the engine sleep when asked to, or when update and awake engine do not fit together; say why."""
    awake = MemoryPlan(facts)
    if not facts.engine_can_sleep:
        return (MemoryPlan(replace(facts, sleeps=True)) if sleep is True else awake), ""
    if sleep != "auto":
        state = "sleeps between rollouts" if sleep else "stays awake"
        return MemoryPlan(replace(facts, sleeps=sleep)), f"engine {state}: model.memory.sleep_between_rollouts is set"
    phase = min((phase for phase in PHASES if phase != "rollout"), key=awake.headroom)
    items = awake.phases[phase]
    engine = sum(item.num_bytes for name, item in items.items() if name.startswith(ENGINE))
    rest = items[CUDA].num_bytes
    sizes = [size / GIB for size in (awake.need(phase) - engine - rest, engine, rest, facts.gpu.total)]
    said = "{} {:.1f} + engine {:.1f} + {:.1f} of {:.1f} GiB".format(phase, *sizes)
    if awake.headroom(phase) >= 0:
        return awake, f"engine stays awake: {said}"
    too_much = f"engine sleeps between rollouts: {said} is more than the {facts.gpu.capacity / GIB:.1f} to plan with"
    return MemoryPlan(replace(facts, sleeps=True)), too_much


def shortfall(plan: MemoryPlan) -> ConfigError | None:
    """Return the error of a plan that does not fit: the phase, its largest items, and the smallest change.

    An engine that does not fit on GPUs of its own is one too.
    """
    own = None if plan.facts.own_engine is None else own_engine_shortfall(plan.facts.own_engine)
    if plan.fits and own is None:
        return None
    problems = [*([] if plan.fits else [_trainer_shortfall(plan)]), *([] if own is None else [own])]
    return ConfigError(" ".join([*problems, "model.memory.on_shortfall: warn lets it run as it is."]))


def _trainer_shortfall(plan: MemoryPlan) -> str:
    phase, gpu = plan.tightest, plan.facts.gpu
    items = sorted(plan.phases[phase].items(), key=lambda pair: pair[1].num_bytes, reverse=True)[:NUM_LARGEST]
    largest = ", ".join(f"{name} {item.num_bytes / GIB:.1f}" for name, item in items)
    return (
        f"the run does not fit into GPU memory: its phase {phase} needs {plan.need(phase) / GIB:.1f} GiB, and "
        f"{gpu.capacity / GIB:.1f} of {gpu.total / GIB:.1f} can be planned with. Largest: {largest}. "
        f"{remedy(plan.facts)}"
    )


def remedy(facts: MemoryInputs) -> str:
    """Return a sentence with the smallest change that makes a run fit, or with alternatives and what each costs."""
    remedies = find_remedies(facts)
    if not remedies:
        return "No option makes it fit: take a smaller model, shorter sequences, or larger GPUs."
    if len(remedies) == 1:
        return f"Smallest change that makes it fit: {remedies[0].text}."
    return f"Nothing makes it fit that trains the same on as many GPUs. One of these does: {alternatives(remedies)}."
