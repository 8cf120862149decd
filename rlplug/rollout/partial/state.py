"""State of a partial rollout between steps: groups that are unfinished, or complete and waiting to train."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlplug.errors import ConfigError
from rlplug.rollout.config import PartialRollout
from rlplug.rollout.partial.staleness import OpenGroup, StalenessBound
from rlplug.rollout.trajectory import Trajectory, new_trajectories
from rlplug.types import Prompt, StepBatch


@dataclass(frozen=True)
class Group:
    """The trajectories of one prompt."""

    engine: int
    """Index of the engine that generates it, whose ranks have its environments."""
    trajectories: list[Trajectory]
    version: int = 0
    """Version of the policy when it started."""

    @property
    def number(self) -> int:
        """Number of the group within the step."""
        return self.trajectories[0].group

    @property
    def is_complete(self) -> bool:
        """Whether all of its trajectories are finished."""
        return all(trajectory.finish_reason is not None for trajectory in self.trajectories)


@dataclass
class PartialRolloutState:
    """Groups that have started and not trained yet, oldest first; between steps the same list on every rank.

    Args:
        options: Limits of the partial rollout.
        prompts_per_step: Groups that a step trains on.
        groups: The groups.
    """

    options: PartialRollout
    prompts_per_step: int
    groups: list[Group] = field(default_factory=list)
    _key: str = ""
    _next_number: int = 0

    @property
    def bound(self) -> StalenessBound | None:
        """The bound on staleness, with ``over_provisioning``."""
        options = self.options
        return None if options.over_provisioning is None else StalenessBound(self.prompts_per_step, options.staleness)

    def num_wanted(self, num_missing: int) -> int:
        """Return the number of new prompts that may start now, where the step lacks ``num_missing`` groups."""
        most = self.options.num_in_flight(self.prompts_per_step)
        if self.bound is not None:
            most = min(most, self.bound.most_open(num_missing))
        return max(0, most - len(self.groups))

    def add(self, prompts: Sequence[Prompt], num_samples: int, key: str, version: int, num_engines: int) -> None:
        """Start a group for each prompt, on the engine that has the fewest; ``key`` names run and step."""
        if key != self._key:  # each step numbers its groups, those of former steps first
            self._key, self._next_number = key, len(self.groups)
            for number, group in enumerate(self.groups):
                for trajectory in group.trajectories:
                    trajectory.group = number
        load = [sum(group.engine % num_engines == n for group in self.groups) for n in range(num_engines)]
        for prompt in prompts:
            engine = load.index(min(load))
            load[engine] += 1
            trajectories = new_trajectories([prompt], [self._next_number], num_samples, key)
            self.groups.append(Group(engine, trajectories, version))
            self._next_number += 1

    def of_engine(self, engine: int, num_engines: int) -> list[Group]:
        """Return the groups that an engine generates."""
        return [group for group in self.groups if group.engine % num_engines == engine]

    def chosen(self, complete: Collection[int], wanted: int, version: int) -> list[int] | None:
        """Return the numbers of the groups that train next, oldest first.

        With ``over_provisioning`` these are ``wanted`` groups, or ``None`` while the step has to wait for more; without
        it, at most ``wanted``.

        Args:
            complete: Numbers of the groups that are complete, of all engines.
            wanted: Groups that the step lacks.
            version: Version of the policy that trains on them.
        """
        if self.bound is None:
            return sorted(complete)[:wanted]
        known = {group.number for group in self.groups if group.is_complete}.union(complete)
        found = self.bound.choose(
            [OpenGroup(group.number, group.version, group.number in known) for group in self.groups], wanted, version
        )
        return None if found is None else [group.number for group in found]

    def release(
        self, mine: Sequence[Group], is_first: bool, wanted: int, version: int, gather: Callable[[Any], Any]
    ) -> list[Group]:
        """Remove the groups that train next, at most ``wanted`` over all ranks; return those of this rank's engine.

        Collective: every rank gets the remaining groups of all engines.

        Args:
            mine: Groups of this rank's engine, as it has generated them.
            is_first: Whether this rank is the first of its engine, which sends the engine's groups.
            wanted: Most groups to remove.
            version: Version of the policy that trains on them.
            gather: Returns the concatenation of all ranks' lists; collective.
        """
        complete = gather([group.number for group in mine if is_first and group.is_complete])
        chosen = set(self.chosen(complete, wanted, version) or ())
        rest: list[Group] = gather([group for group in mine if is_first and group.number not in chosen])
        released = [group for group in mine if group.number in chosen]
        # this rank keeps its own objects of its engine's groups
        own = {group.number: group for group in mine}
        self.groups = sorted((own.get(group.number, group) for group in rest), key=lambda group: group.number)
        return released

    def metrics(self, batch: StepBatch, version: int) -> dict[str, float]:
        """Return ``partial/...``: the number of kept groups, and the age of tokens in policy versions. Collective."""
        ages = torch.from_numpy((version - batch.per_token["policy_versions"])[batch.per_token["response_mask"]])
        found = batch.step.moments(ages)
        return {
            "partial/groups_in_flight": float(len(self.groups)),
            "partial/groups_complete": float(sum(group.is_complete for group in self.groups)),
            "partial/age_mean": found.mean,
            "partial/age_max": found.largest if found.count else 0.0,
            "partial/former_share": batch.step.mean((ages > 0).double()),
        }

    # ---- in a checkpoint ------------------------------------------------------------------------------------------

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the groups as plain data, which later steps do not change."""
        return [
            {
                "engine": group.engine,
                "trajectories": [trajectory.state_dict() for trajectory in group.trajectories],
                "version": group.version,
            }
            for group in self.groups
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]], prompts: Mapping[str, Prompt]) -> None:
        """Restore a :meth:`state_dict`; ``prompts`` has the training prompts by ``uid``."""
        self._key = ""
        self.groups = [
            Group(
                group["engine"],
                [Trajectory.from_state(each, prompts[each["prompt"]]) for each in group["trajectories"]],
                group["version"],
            )
            for group in state
        ]


def load_partial_rollout(
    state: PartialRolloutState | None, groups: list[dict[str, Any]], by_uid: Mapping[str, Prompt]
) -> None:
    """Load the groups that a checkpoint has under way.

    Raises:
        ConfigError: There are some, and the run keeps none.
    """
    if state is not None:
        state.load_state_dict(groups, by_uid)
    elif groups:
        raise ConfigError(
            f"The checkpoint has {len(groups)} groups in flight, and model.partial_rollout is not set: set it as in "
            "the run that wrote the checkpoint."
        )
