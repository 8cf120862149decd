"""State of a partial rollout between steps: the ledger of its groups, and the trajectories of this rank's engine."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlplug.errors import ConfigError
from rlplug.rollout.config import PartialRollout, TurnOptions
from rlplug.rollout.partial.ledger import GroupLedger
from rlplug.rollout.partial.replay import GroupSchedule, fingerprint, read_schedule
from rlplug.rollout.ranks import EngineRanks
from rlplug.rollout.trajectory import Trajectory, new_trajectories
from rlplug.types import NO_VERSION, Prompt, StepBatch


@dataclass(frozen=True)
class Snapshot:
    """A rank's copy of the state, to which a step that is discarded goes back."""

    ledger: dict[str, Any]
    trajectories: dict[int, list[Trajectory]]


class PartialRolloutState:
    """Groups that have started and not trained yet.

    The ledger is the same on every rank between steps. Trajectories are on the ranks of their engine alone, and travel
    for a checkpoint only.

    Args:
        options: Limits of the partial rollout.
        prompts_per_step: Groups that a step trains on.
    """

    def __init__(self, options: PartialRollout, prompts_per_step: int) -> None:
        self.options = options
        self.ledger = GroupLedger(prompts_per_step, options.num_in_flight(prompts_per_step), options.bound)
        self.trajectories: dict[int, list[Trajectory]] = {}
        """Those of this rank's engine, by the number of their group, oldest first; of all engines after a load."""
        self.schedule = GroupSchedule({})
        self._staleness: list[int] = []
        """Of the groups that were released since the last metrics."""
        self._num_resumed = self._tokens_read_again = self._num_late = 0
        self._step_starts_at = (NO_VERSION, 0)
        """Version of the newest groups, and the number of the first of them."""

    def identify(self, seed: int | None, data: Mapping[str, Any], group_size: int, num_steps: int) -> None:
        """Say whose groups these are, and read those that ``replay`` repeats.

        Args:
            seed: Seed of the run.
            data: What the stream of training prompts says of its prompts and their order.
            group_size: Samples of a group.
            num_steps: Steps of the run.

        Raises:
            ConfigError: ``replay`` does not fit; the message names the key.
        """
        ledger = self.ledger
        run = {"seed": seed, "data": fingerprint(data), "prompts_per_step": ledger.groups_per_step}
        run |= {"group_size": group_size, "max_open": ledger.max_open, "max_staleness": ledger.max_staleness}
        self.schedule = GroupSchedule(run)
        if self.options.replay is not None:
            self.schedule = read_schedule(Path(self.options.replay), run, num_steps)

    def num_wanted(self, num_missing: int) -> int:
        """Return the number of new prompts that may start now, where the step lacks ``num_missing`` groups."""
        return self.ledger.num_startable(num_missing)

    def start(self, prompts: Sequence[Prompt], num_samples: int, key: str, version: int, ranks: EngineRanks) -> None:
        """Start a group for each prompt, and keep the trajectories of this rank's engine alone.

        Args:
            prompts: The same on every rank.
            num_samples: Trajectories per prompt.
            key: Name of run and step.
            version: Version of the policy.
            ranks: The ranks of this rank's engine.
        """
        if self._step_starts_at[0] != version:
            self._step_starts_at = version, self.ledger.num_started
        # with the keys of a synchronous step, which counts its groups from 0, a streamed one draws the same samples
        first = self._step_starts_at[1] if self.options.streams else 0
        for prompt in prompts:
            number = self.ledger.start(version, ranks.num_engines).number
            self.trajectories[number] = new_trajectories([prompt], [number - first], num_samples, key)
        self.trajectories = {
            number: self.trajectories[number]
            for number, group in self.ledger.open.items()
            if group.engine % ranks.num_engines == ranks.engine
        }

    @property
    def awaits_groups(self) -> bool:
        """Whether the step trains on groups that are still generated, besides those it has."""
        return self.options.streams and bool(self.ledger.open)

    @property
    def all_trajectories(self) -> list[Trajectory]:
        """The trajectories of this rank's engine."""
        return [trajectory for group in self.trajectories.values() for trajectory in group]

    def note_resumed(self) -> None:
        """Count the trajectories that the engine is about to go on with, for the metrics."""
        resumed = [each for each in self.all_trajectories if each.finish_reason is None and each.num_after_prompt]
        self._num_resumed += len(resumed)
        self._tokens_read_again += sum(len(trajectory.token_ids) for trajectory in resumed)

    def complete(self) -> list[int]:
        """Return the numbers of the groups of this rank's engine whose trajectories are all finished."""
        return [
            number
            for number, group in self.trajectories.items()
            if all(trajectory.finish_reason is not None for trajectory in group)
        ]

    def is_enough(self, complete: Collection[int], wanted: int, version: int) -> bool:
        """Return whether the step need not wait, when the groups ``complete`` are, of all engines.

        Args:
            complete: Numbers of groups.
            wanted: Groups that the step lacks.
            version: Version of the policy that trains on them.
        """
        return self._choose(wanted, version, complete) is not None

    def _choose(self, wanted: int, version: int, complete: Collection[int] = ()) -> list[int] | None:
        """Return what the ledger chooses, or what trained in the run that is repeated."""
        if self.options.streams:
            return self.ledger.choose_part(complete)
        repeated = self.schedule.next_groups()
        if repeated is None:
            return self.ledger.choose(wanted, version, complete)
        is_complete = (self.ledger.open[number].is_complete or number in complete for number in repeated)
        return repeated if all(is_complete) else None

    def release(
        self, wanted: int, version: int, ranks: EngineRanks, gather: Callable[[Any], Any]
    ) -> list[list[Trajectory]] | None:
        """Remove the groups that train next; return the trajectories of those of this rank's engine.

        Collective: ranks exchange the numbers of complete groups alone. ``None``, on all ranks, says that the step has
        to wait.

        Args:
            wanted: Most groups to remove, over all ranks.
            version: Version of the policy that trains on them.
            ranks: The ranks of this rank's engine.
            gather: Returns the concatenation of all ranks' lists; collective.
        """
        own = [(number, self._count_late(number)) for number in self.complete()]
        num_late: dict[int, int] = dict(gather(own if ranks.is_first else []))
        self.ledger.complete(num_late)
        chosen = self._choose(wanted, version)
        if chosen is None:
            return None
        self.schedule.taken.append(chosen)
        self._staleness += [version - group.version for group in self.ledger.close(chosen)]
        if late := sum(num_late.get(number, 0) for number in chosen):
            self._num_late += late
            warnings.warn(
                f"{late} trajectories took longer than model.partial_rollout.trajectory_deadline_s "
                f"({self.options.trajectory_deadline_s:g} s), and do not train.",
                stacklevel=2,
            )
        return [self.trajectories.pop(number) for number in chosen if number in self.trajectories]

    def _count_late(self, number: int) -> int:
        """Return how many trajectories of a complete group were given up, because their time was over."""
        return sum(trajectory.is_late and bool(trajectory.error) for trajectory in self.trajectories[number])

    def metrics(self, batch: StepBatch, version: int) -> dict[str, float]:
        """Return ``partial/...`` since the last call: groups, what was resumed, and ages in policy versions.

        Collective.
        """
        ages = torch.from_numpy((version - batch.per_token["policy_versions"])[batch.per_token["response_mask"]])
        of_tokens = batch.step.moments(ages)
        groups = self.ledger.open.values()
        num_resumed, self._num_resumed = self._num_resumed, 0
        num_read, self._tokens_read_again = self._tokens_read_again, 0
        num_late, self._num_late = self._num_late, 0
        return {
            "partial/resumed": float(num_resumed),
            "partial/tokens_read_again": float(num_read),
            "partial/late": float(num_late),
            "partial/groups_in_flight": float(len(groups)),
            "partial/groups_complete": float(sum(group.is_complete for group in groups)),
            "partial/age_mean": of_tokens.mean,
            "partial/age_max": of_tokens.largest if of_tokens.count else 0.0,
            "partial/former_share": batch.step.mean((ages > 0).double()),
            **self._staleness_metrics(),
        }

    def _staleness_metrics(self) -> dict[str, float]:
        """Return the staleness of the groups released since the last call; with a bound, its histogram too."""
        found, self._staleness = self._staleness, []
        metrics = {
            "partial/staleness_mean": statistics.fmean(found) if found else 0.0,
            "partial/staleness_max": float(max(found, default=0)),
        }
        for staleness in range((self.ledger.max_staleness or -1) + 1):
            metrics[f"partial/staleness_{staleness}"] = found.count(staleness) / max(len(found), 1)
        return metrics

    # ---- a step that is discarded ---------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return a copy of this rank's state: cheap, since tokens are arrays that nothing changes in place."""
        return Snapshot(
            self.ledger.state_dict(),
            {number: [each.copy() for each in group] for number, group in self.trajectories.items()},
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a :meth:`snapshot` of this rank."""
        self.ledger.load_state_dict(snapshot.ledger)
        self.trajectories = snapshot.trajectories
        self._staleness = []
        self.schedule.discard()

    # ---- in a checkpoint ------------------------------------------------------------------------------------------

    def state_dict(self, gather: Callable[[Any], Any]) -> dict[str, Any]:
        """Return ledger and trajectories of all engines as plain data, which later steps do not change. Collective."""
        own = [(number, [each.state_dict() for each in group]) for number, group in self.trajectories.items()]
        by_number = dict(gather(own))  # ranks that share an engine have the same groups
        return {"ledger": self.ledger.state_dict(), "trajectories": dict(sorted(by_number.items()))}

    def load_state_dict(self, state: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> None:
        """Restore a :meth:`state_dict`; ``prompts`` has the training prompts by ``uid``."""
        self.ledger.load_state_dict(state["ledger"])
        self.trajectories = {
            number: [Trajectory.from_state(each, prompts[each["prompt"]]) for each in group]
            for number, group in state["trajectories"].items()
        }
        self._staleness = []


def load_partial_rollout(
    state: PartialRolloutState | None,
    saved: Mapping[str, Any] | None,
    by_uid: Mapping[str, Prompt],
    version: int,
    max_new_tokens: int,
    turns: TurnOptions,
) -> None:
    """Load the groups that a checkpoint has under way.

    Args:
        state: Where to; ``None`` for a run without a partial rollout.
        saved: What the checkpoint has; ``None`` if its run had none.
        by_uid: The training prompts.
        version: Version of the checkpoint's policy.
        max_new_tokens: Most tokens of a trajectory after its prompt.
        turns: Limits of turns.

    Raises:
        ConfigError: There are some, and the run keeps none, has not their prompts, allows fewer tokens than they have,
            or cannot train them within its bound.
    """
    if state is not None and saved is not None:
        uids = {each["prompt"] for group in saved["trajectories"].values() for each in group}
        if missing := sorted(uids - by_uid.keys()):
            raise ConfigError(
                f"The checkpoint has groups in flight of {len(missing)} prompts that data.train has not any more, such "
                f"as {missing[0]!r}: resume with the data.train of the run that wrote the checkpoint."
            )
        state.load_state_dict(saved, by_uid)
        _check_lengths(state.all_trajectories, max_new_tokens, turns.max_tokens_per_turn)
        if not state.ledger.is_in_time(version):
            raise ConfigError(
                f"The checkpoint has {len(state.ledger.open)} groups in flight, which cannot all train within "
                f"model.partial_rollout.max_staleness {state.ledger.max_staleness} with model.batch.prompts_per_step "
                f"{state.ledger.groups_per_step}: resume with those of the run that wrote the checkpoint."
            )
    elif saved is not None and saved["trajectories"]:
        raise ConfigError(
            f"The checkpoint has {len(saved['trajectories'])} groups in flight, and model.partial_rollout is not set: "
            "set it as in the run that wrote the checkpoint."
        )


def _check_lengths(trajectories: Sequence[Trajectory], max_new_tokens: int, max_tokens_per_turn: int | None) -> None:
    """Refuse limits that trajectories exceed, or that leave an unfinished one no next token."""
    unfinished = [each for each in trajectories if each.finish_reason is None and not each.awaits_answer]
    longest = max((each.num_after_prompt for each in trajectories), default=0)
    least = {
        "model.sampling.max_new_tokens": max([longest, *(each.num_after_prompt + 1 for each in unfinished)]),
        "model.turns.max_tokens_per_turn": max((each.num_in_turn + 1 for each in unfinished), default=0),
    }
    for (key, needed), limit in zip(least.items(), (max_new_tokens, max_tokens_per_turn), strict=True):
        if limit is not None and limit < needed:
            raise ConfigError(
                f"{key} is {limit}, and the checkpoint has trajectories in flight that need {needed}: resume with that "
                "of the run that wrote it."
            )
