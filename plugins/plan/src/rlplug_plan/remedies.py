"""The smallest change that makes a plan fit: a search over the keys of :mod:`rlplug_plan.levers`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlplug.interfaces.memory_plan import RESERVE_SHARE
from rlplug.types import GIB
from rlplug_plan.inputs import MemoryInputs
from rlplug_plan.levers import GPUS, LITTLE, NAMES, OFFLOADS, OPTIMIZATIONS, TRAINING, Lever
from rlplug_plan.plan import MemoryPlan

SMALL_SHARE: Final = 0.25
"""Share of the reserve that a run may lack before more than one key is proposed."""
FEW: Final = 2
"""Keys up to which every combination is tried; for more, those without which nothing fits are found first."""
TENSOR: Final = "tensor"
AXES: Final = frozenset({TENSOR, "sequence"})
RISING: Final = frozenset({*AXES, "engine GPUs", GPUS.name})
MIXED: Final = frozenset({*AXES, "passes", "critic passes", "fused"})
"""Levers that can take more than they save: whole embeddings, gradients between passes, the output layer's gradient."""
ON_SHORTFALL: Final = "model.memory.on_shortfall"


@dataclass(frozen=True)
class Setting:
    """A key and its new value."""

    name: str
    """Its lever's."""
    key: str
    value: Any
    cost: str
    note: str = ""

    @property
    def text(self) -> str:
        """The key and its value, as a person sets them."""
        if self.name == GPUS.name:
            return f"{self.value} {self.key}"
        if self.key == OPTIMIZATIONS:
            return f"{self.value} in {self.key}{self.note}"
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.key}: {value}"


@dataclass(frozen=True)
class Change:
    """A value of a lever, and the run before it was set."""

    lever: Lever
    value: Any
    before: MemoryInputs

    def setting(self, after: MemoryInputs) -> Setting:
        """Return its key and what it costs, in the run with all changes."""
        lever, before = self.lever, self.before
        return Setting(lever.name, lever.key_of(before), self.value, lever.cost_of(after), lever.note(before))


@dataclass(frozen=True)
class Remedy:
    """One way to make a plan fit."""

    settings: tuple[Setting, ...]
    facts: MemoryInputs
    """The run with them."""

    @property
    def order(self) -> tuple[Any, ...]:
        return order((setting.name, setting.value) for setting in self.settings)

    @property
    def text(self) -> str:
        """All keys, and what they cost."""
        texts = [f"{setting.text} ({setting.cost})" for setting in self.settings]
        return ", with ".join([texts[0], " and ".join(texts[1:])]) if len(texts) > 1 else texts[0]


def order(changes: Iterable[tuple[str, Any]]) -> tuple[Any, ...]:
    """Return what sorts changes by size, each as the names of its levers with their values: smaller is less.

    More GPUs are larger than another training, and that than anything else. Then fewer keys are smaller, then those
    that cost less by the order of :data:`rlplug_plan.levers.LEVERS`, the costliest of each compared first; then milder
    values, of the costliest key first.
    """
    ranked = sorted(((NAMES.index(name), value) for name, value in changes), reverse=True)
    ranks = [rank for rank, _ in ranked]
    num_gpus = next((value for rank, value in ranked if NAMES[rank] == GPUS.name), 0)
    trains_other = any(NAMES[rank] in {lever.name for lever in TRAINING} for rank in ranks)
    return num_gpus, trains_other, len(ranked), ranks, [_strength(NAMES[rank], value) for rank, value in ranked]


def _strength(name: str, value: Any) -> float:
    """Return how far a value goes: numbers of ranks rise, and all other numbers fall."""
    if value in OFFLOADS:
        return OFFLOADS.index(value)
    if isinstance(value, (bool, str)):
        return 0
    return float(value if name in RISING else -value)


def alternatives(remedies: Iterable[Remedy]) -> str:
    """Return remedies of which a person chooses one, numbered, each with its costs."""
    return "; ".join(f"({number}) {each.text}" for number, each in enumerate(remedies, 1))


# ---- the search -------------------------------------------------------------------------------------------------


def find_remedies(facts: MemoryInputs, may_try: bool = True) -> list[Remedy]:
    """Return the smallest change that makes the plan fit; where it changes training or hardware, others beside it.

    Before several keys a person would try the run as it is, if little is missing of what the plan holds in reserve.
    With the same training on the same GPUs there is one, or none. Then up to three are alternatives: another training,
    as few GPUs as can be, and more GPUs with the fewest other keys.

    Args:
        facts: The run, which does not fit.
        may_try: Whether to try it as it is may be proposed: not of a run that was tried.
    """
    warning = _warning(facts) if may_try else None
    found = _smallest(facts, LITTLE, FEW - 1) or warning or _smallest(facts, LITTLE)
    if found is not None:
        return [found]
    trained = [_after(facts, lever, value) for lever in TRAINING for value in lever.values(facts)]
    others = [remedy for start in trained if (remedy := _smallest(start.facts, LITTLE, start=start)) is not None]
    larger = [_after(facts, GPUS, number) for number in GPUS.values(facts)]
    with_gpus = [found for start in larger if (found := _smallest(start.facts, LITTLE, start=start)) is not None]
    alternatives = [min(others, key=lambda remedy: remedy.order)] if others else []
    if with_gpus:
        fewest, simplest = with_gpus[0], min(with_gpus, key=lambda remedy: len(remedy.settings))
        alternatives += [fewest] if fewest is simplest else [fewest, simplest]
    return alternatives


def _warning(facts: MemoryInputs) -> Remedy | None:
    missing = -MemoryPlan(facts).headroom(MemoryPlan(facts).tightest)
    reserve = int(RESERVE_SHARE * facts.gpu.total)
    if missing > SMALL_SHARE * reserve:
        return None
    cost = f"{missing / GIB:.2f} GiB are missing and the plan holds {reserve / GIB:.2f} in reserve"
    return Remedy((Setting("warn", ON_SHORTFALL, "warn", cost),), facts)


def _smallest(
    facts: MemoryInputs, levers: Sequence[Lever], most: int | None = None, start: Remedy | None = None
) -> Remedy | None:
    """Return the smallest remedy with the keys of ``levers``, at most ``most`` of them, besides those of ``start``."""
    start = Remedy((), facts) if start is None else start
    if start.settings and MemoryPlan(facts).fits:
        return start
    most = len(levers) if most is None else most
    needed: frozenset[Lever] = frozenset()
    for count in range(1, most + 1):
        if count == FEW + 1:
            applied = sorted(levers, key=_step)
            if not _can_fit(facts, applied):
                return None
            without = {lever: [each for each in applied if each is not lever] for lever in levers}
            needed = frozenset(lever for lever, others in without.items() if not _can_fit(facts, others))
        for chosen in _combinations(levers, needed, count):
            found = _mildest(start, chosen)
            if found is not None:
                return found
    return None


def _combinations(levers: Sequence[Lever], needed: frozenset[Lever], count: int) -> list[list[Lever]]:
    """Return all combinations with ``needed``, the costliest lever of each last, in the order of :func:`order`."""
    others = [index for index, lever in enumerate(levers) if lever not in needed]
    always = [index for index, lever in enumerate(levers) if lever in needed]
    if count < len(always):
        return []
    found = [sorted([*always, *more], reverse=True) for more in itertools.combinations(others, count - len(always))]
    return [[levers[index] for index in reversed(indices)] for indices in sorted(found)]


def _mildest(start: Remedy, levers: Sequence[Lever]) -> Remedy | None:
    """Return the run with the mildest values of all ``levers`` that fit, of the costliest first."""
    values: dict[Lever, Any] = {}
    applied = sorted(levers, key=_step)
    if _fitting(start.facts, applied, values) is None:
        return None
    for lever in reversed(levers):
        path = _fitting(start.facts, applied, values, lever)
        assert path is not None
        values[lever] = next(change.value for change in path if change.lever is lever)
    path = _fitting(start.facts, applied, values)
    assert path is not None
    return _remedy(start, levers, path)


def _fitting(
    facts: MemoryInputs, levers: Sequence[Lever], values: Mapping[Lever, Any], varied: Lever | None = None
) -> list[Change] | None:
    """Return changes of all ``levers`` with which the run fits: those of ``values``, the mildest of ``varied``.

    Others take any of the values that :func:`_best_values` returns.
    """
    if not levers:
        return [] if MemoryPlan(facts).fits else None
    first, possible = levers[0], levers[0].values(facts)
    if first in values:
        possible = [value for value in possible if value == values[first]]
    elif first is not varied:
        possible = _best_values(first, facts)
    for value in possible:
        rest = _fitting(first.apply(facts, value), levers[1:], values, varied)
        if rest is not None:
            return [Change(first, value, facts), *rest]
    return None


def _can_fit(facts: MemoryInputs, levers: Sequence[Lever]) -> bool:
    """Return whether the run fits with all levers that apply at their strongest, and with or without those of MIXED."""
    if not levers:
        return MemoryPlan(facts).fits
    first, *rest = levers
    values = _best_values(first, facts)
    is_optional = first.name in MIXED or not values
    return any(_can_fit(first.apply(facts, value), rest) for value in values) or (is_optional and _can_fit(facts, rest))


def _best_values(lever: Lever, facts: MemoryInputs) -> list[Any]:
    """Return the values with which the run may take least: the strongest, and others where that can take more."""
    values, sizes = list(lever.values(facts)), facts.sizes
    if lever.name in AXES:
        return values[::-1]
    best = values[-1:]
    if (
        lever.name in ("passes", "critic passes") and sizes.micro_batch_size is None
    ):  # below it, gradients are whole between passes
        whole = [value for value in values if value * sizes.sequence_size >= sizes.rows("update") * sizes.longest]
        best += whole[-1:]
    return best


def _step(lever: Lever) -> tuple[int, int]:
    """Return what sorts levers as they are applied: first what other values depend on, the tensor axis before all."""
    return (0 if lever.name == TENSOR else 1 if lever.comes_first else 2, NAMES.index(lever.name))


def _after(facts: MemoryInputs, lever: Lever, value: Any) -> Remedy:
    return _remedy(Remedy((), facts), [lever], [Change(lever, value, facts)])


def _remedy(start: Remedy, levers: Sequence[Lever], path: Sequence[Change]) -> Remedy:
    """Return ``start`` and the changes of ``path``, said in the order of ``levers``."""
    last = path[-1]
    facts = last.lever.apply(last.before, last.value)
    by_lever = {change.lever: change for change in path}
    settings = [by_lever[lever].setting(facts) for lever in levers]
    return Remedy((*start.settings, *settings), facts)
