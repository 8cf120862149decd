"""Which groups may start and which train next, so that no group trains too many policy versions after it started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OpenGroup:
    """A group that has started and not trained yet."""

    number: int
    version: int
    """Version of the policy when it started."""
    is_complete: bool


@dataclass(frozen=True)
class StalenessBound:
    """Two rules that bound the staleness of every group, whatever order groups end in, and drop none.

    Staleness is the version of the policy that trains on a group, less the version at which the group started. The
    first rule limits the groups that are open. The second one chooses the oldest complete groups, but only if those
    that stay open can still train within the bound when each later step takes ``groups_per_step``; else the step waits
    for older ones. If all open groups are complete, the second rule is satisfied.

    Args:
        groups_per_step: Groups that a step trains on.
        max_staleness: Largest staleness, in policy versions; a version is published after each step.
    """

    groups_per_step: int
    max_staleness: int

    def most_open(self, num_wanted: int) -> int:
        """Return how many groups may be open while a step still wants ``num_wanted`` of them."""
        return self.max_staleness * self.groups_per_step + num_wanted

    def choose(self, groups: Sequence[OpenGroup], num_wanted: int, version: int) -> list[OpenGroup] | None:
        """Return the groups that train next, oldest first, or ``None`` while the step has to wait.

        Args:
            groups: The open groups, oldest first.
            num_wanted: Groups that the step still wants.
            version: Version of the policy that would train on them.
        """
        chosen = [group for group in groups if group.is_complete][:num_wanted]
        if len(chosen) < num_wanted:
            return None
        taken = {group.number for group in chosen}
        rest = [group for group in groups if group.number not in taken]
        for position, group in enumerate(rest, start=1):
            steps_left = group.version + self.max_staleness - version
            if position > steps_left * self.groups_per_step:
                return None
        return chosen
