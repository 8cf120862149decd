"""The queue of a partial rollout: which groups may start, and which train next. No clock, no thread, no engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class OpenGroup:
    """A group that has started and not trained yet."""

    number: int
    """Its place among all groups of the run, from 0."""
    version: int
    """Version of the policy when it started: no token of it is older."""
    engine: int
    """Index of the engine that generates it, whose ranks have its trajectories."""
    is_complete: bool = False


@dataclass
class GroupQueue:
    """Keeps the staleness of every group within a bound, whatever order groups end in, and drops none.

    Staleness is the version of the policy that trains on a group, less the version at which the group started.
    :meth:`num_startable` limits the groups that are open. :meth:`choose` takes the oldest complete groups, but only if
    those that stay open can still train within the bound when each later step takes ``groups_per_step``; else the step
    waits for older ones. It never waits when all open groups are complete, so no step waits for ever.

    Args:
        groups_per_step: Groups that a step trains on.
        max_open: Most groups that are open at once.
        max_staleness: Largest staleness, in policy versions, where each step publishes at most one; ``None`` for no
            bound: then a step takes what is complete.
    """

    groups_per_step: int
    max_open: int
    max_staleness: int | None
    open: dict[int, OpenGroup] = field(default_factory=dict)
    """The open groups by number, oldest first."""
    num_started: int = 0
    """Groups that have started in the run so far."""

    def num_startable(self, num_wanted: int) -> int:
        """Return how many groups may start now, while the step still wants ``num_wanted`` of them."""
        most = self.max_open
        if self.max_staleness is not None:
            most = min(most, self.max_staleness * self.groups_per_step + num_wanted)
        return max(0, most - len(self.open))

    def start(self, version: int, num_engines: int) -> OpenGroup:
        """Start a group with the policy's version, on the engine that has the fewest incomplete ones."""
        load = [0] * num_engines
        for group in self.open.values():
            load[group.engine % num_engines] += not group.is_complete
        group = OpenGroup(self.num_started, version, engine=load.index(min(load)))
        self.open[group.number] = group
        self.num_started += 1
        return group

    def complete(self, numbers: Iterable[int]) -> None:
        """Note groups whose trajectories are all finished; they stay open until they are closed."""
        for number in numbers:
            self.open[number].is_complete = True

    def choose(self, num_wanted: int, version: int, complete: Collection[int] = ()) -> list[int] | None:
        """Return the numbers of the groups that train next, oldest first, or ``None`` while the step has to wait.

        More complete groups never turn an answer into ``None``, so that engines which learn of each other's complete
        groups at different times come to agree.

        Args:
            num_wanted: Groups that the step still wants; without a bound, fewer may be returned.
            version: Version of the policy that would train on them.
            complete: Numbers of groups that are complete beside those that are noted.
        """
        known = [group for group in self.open.values() if group.is_complete or group.number in complete]
        chosen = [group.number for group in known[:num_wanted]]
        if self.max_staleness is None:
            return chosen
        if len(chosen) < num_wanted:
            return None
        taken = set(chosen)
        rest = (group for group in self.open.values() if group.number not in taken)
        for position, group in enumerate(rest, start=1):
            steps_left = group.version + self.max_staleness - version
            if position > steps_left * self.groups_per_step:
                return None
        return chosen

    def choose_part(self, complete: Collection[int] = ()) -> list[int] | None:
        """Return the complete groups, oldest first, where all open ones train in this step, or ``None`` to wait.

        At least half of the open groups: so a step has no more parts than its groups have binary digits, and one more.
        As in :meth:`choose`, more complete groups never turn an answer into ``None``.
        """
        chosen = [group.number for group in self.open.values() if group.is_complete or group.number in complete]
        return chosen if 2 * len(chosen) >= len(self.open) else None

    def is_in_time(self, version: int) -> bool:
        """Return whether all open groups can train within the bound, from the step of ``version`` on.

        They always can unless the bound, or the groups of a step, were larger when they started.
        """
        if self.max_staleness is None:
            return True
        if any(version - group.version > self.max_staleness for group in self.open.values()):
            return False
        return len(self.open) < self.groups_per_step or bool(self.choose(self.groups_per_step, version, self.open))

    def close(self, numbers: Iterable[int]) -> list[OpenGroup]:
        """Remove groups that train, or that the algorithm rejects, and return them."""
        return [self.open.pop(number) for number in numbers]

    # ---- in a checkpoint ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the open groups and the count as plain data, which later steps do not change."""
        return {"open": [dataclasses.asdict(group) for group in self.open.values()], "num_started": self.num_started}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`; the limits stay those of this run."""
        groups = [OpenGroup(**group) for group in state["open"]]
        self.open = {group.number: group for group in groups}
        self.num_started = state["num_started"]
