"""The source of a partial rollout: groups that have started and not trained yet go on in the next step."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlplug.errors import ConfigError
from rlplug.interfaces import Algorithm, RolloutEngine
from rlplug.plugin_manager import plugins
from rlplug.rollout.agent_loop import GenerationStep
from rlplug.rollout.config import PartialRollout, TurnOptions
from rlplug.rollout.ranks import EngineRanks
from rlplug.rollout.source import RolloutGenerator, RolloutRequest, RolloutSource
from rlplug.rollout.trajectory import Trajectory, new_trajectories
from rlplug.rollout.turns.trajectory_turns import TurnRules
from rlplug.types import NO_VERSION, Prompt, Sample, StepBatch
from rlplug_async.enough_groups import CompleteGroups, EnoughGroups
from rlplug_async.group_queue import GroupQueue
from rlplug_async.option_checks import check_partial_rollout, check_streaming
from rlplug_async.replay import GroupSchedule, fingerprint, read_schedule
from rlplug_async.timeline import EngineTimeline, timeline_of


class PartialSource(RolloutSource):
    """Goes on with unfinished groups, and returns those that are complete.

    The queue is the same on every rank between steps. Trajectories are on the ranks of their engine alone, and travel
    for a checkpoint only.

    Args:
        options: Limits of the partial rollout.
        prompts_per_step: Groups that a step trains on.
    """

    _rules: TurnRules
    """With environments of its own, whose steps may go on while a validation uses the generator's."""
    _complete_groups: CompleteGroups

    def __init__(self, options: PartialRollout, prompts_per_step: int) -> None:
        self.options = options
        self.queue = GroupQueue(prompts_per_step, num_in_flight(options, prompts_per_step), options.bound)
        self.trajectories: dict[int, list[Trajectory]] = {}
        """Those of this rank's engine, by the number of their group, oldest first; of all engines after a load."""
        self.schedule = GroupSchedule({})
        self._staleness: list[int] = []
        """Of the groups that were released since the last metrics."""
        self._num_resumed = self._num_reprefilled = self._num_late = 0
        self._before_step: tuple[dict[str, Any], dict[int, list[Trajectory]]] = {}, {}
        self._step_starts_at = (NO_VERSION, 0)
        """Version of the newest groups, and the number of the first of them."""
        self.timeline = EngineTimeline()
        """What an engine that generates in the background did since it was last taken."""

    def start(self, generator: RolloutGenerator) -> None:
        super().start(generator)
        self._rules = generator.make_rules()
        self._complete_groups = CompleteGroups(generator.store, generator.ranks.engine, generator.ranks.num_engines)

    # ---- a step ---------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Keep a copy of this rank's state: cheap, since tokens are arrays that nothing changes in place."""
        self.pause()
        copies = {number: [each.copy() for each in group] for number, group in self.trajectories.items()}
        self._before_step = self.queue.state_dict(), copies
        self.schedule.begin(step)

    def rollback(self) -> None:
        """Go back to where the step began, on this rank."""
        self.pause()
        queue, self.trajectories = self._before_step
        self.queue.load_state_dict(queue)
        self._staleness = []
        self.schedule.discard()

    @property
    def awaits_groups(self) -> bool:
        return self.options.streams and bool(self.queue.open)

    def num_prompts_wanted(self, num_missing: int, over_sampling: float) -> int:
        return 0 if self.awaits_groups else self.queue.num_startable(num_missing)

    def next_groups(self, request: RolloutRequest, num_missing: int, num_drawn: int) -> list[Sample]:
        self.start_groups(request, self.generator.ranks)
        return self.generator.share_of_rank(self._generate(request, num_missing))

    def _generate(self, request: RolloutRequest, num_missing: int) -> list[list[Trajectory]]:
        """Generate within the step's limits; return the groups of this rank's engine that train next."""
        generator = self.generator
        is_enough = None if self.options.bound is None else self._is_enough(request, num_missing, request.key)
        self._note_resumed()
        step = GenerationStep(self.options, is_enough)
        generator.loop(self.all_trajectories, request, self._rules, step).run(generator.driver)
        released = self._release(num_missing, request.policy_version)
        assert released is not None, "the loop ends with enough groups, or with all of them complete"
        return released

    def _is_enough(self, request: RolloutRequest, num_missing: int, wait_key: str) -> EnoughGroups:
        """Return what tells that the groups that the step lacks are complete, over all engines."""
        return EnoughGroups(
            own=self.complete,
            suffice=lambda complete: self._choose(num_missing, request.policy_version, complete) is not None,
            complete_groups=self._complete_groups,
            wait_key=wait_key,
        )

    def start_groups(self, request: RolloutRequest, ranks: EngineRanks) -> None:
        """Start a group for each prompt, and keep the trajectories of this rank's engine alone.

        Args:
            request: Prompts of the new groups.
            ranks: The ranks of this rank's engine.
        """
        version = request.policy_version
        if self._step_starts_at[0] != version:
            self._step_starts_at = version, self.queue.num_started
        # with the keys of a synchronous step, which counts its groups from 0, a streamed one draws the same samples
        first = self._step_starts_at[1] if self.options.streams else 0
        for prompt in request.prompts:
            number = self.queue.start(version, ranks.num_engines).number
            group = [number - first]
            self.trajectories[number] = new_trajectories([prompt], group, request.num_samples, request.key)
        self.trajectories = {
            number: self.trajectories[number]
            for number, its in self.queue.open.items()
            if its.engine % ranks.num_engines == ranks.engine
        }

    @property
    def all_trajectories(self) -> list[Trajectory]:
        """The trajectories of this rank's engine."""
        return [trajectory for group in self.trajectories.values() for trajectory in group]

    def _note_resumed(self) -> None:
        """Count the trajectories that the engine is about to go on with, for the metrics."""
        resumed = [each for each in self.all_trajectories if each.finish_reason is None and each.num_after_prompt]
        self._num_resumed += len(resumed)
        self._num_reprefilled += sum(len(trajectory.token_ids) for trajectory in resumed)

    def complete(self) -> list[int]:
        """Return the numbers of the groups of this rank's engine whose trajectories are all finished."""
        return [
            number
            for number, group in self.trajectories.items()
            if all(trajectory.finish_reason is not None for trajectory in group)
        ]

    def _choose(self, wanted: int, version: int, complete: Collection[int] = ()) -> list[int] | None:
        """Return what the queue chooses, or what trained in the run that is repeated."""
        if self.options.streams:
            return self.queue.choose_part(complete)
        repeated = self.schedule.next_groups()
        if repeated is None:
            return self.queue.choose(wanted, version, complete)
        is_complete = (self.queue.open[number].is_complete or number in complete for number in repeated)
        return repeated if all(is_complete) else None

    def _release(self, wanted: int, version: int) -> list[list[Trajectory]] | None:
        """Remove the groups that train next; return the trajectories of those of this rank's engine.

        Collective: ranks exchange the numbers of complete groups alone. ``None``, on all ranks, says that the step has
        to wait.

        Args:
            wanted: Most groups to remove, over all ranks.
            version: Version of the policy that trains on them.
        """
        own = [(number, self._count_late(number)) for number in self.complete()]
        num_late: dict[int, int] = dict(self.generator.gather(own if self.generator.ranks.is_first else []))
        self.queue.complete(num_late)
        chosen = self._choose(wanted, version)
        if chosen is None:
            return None
        self.schedule.taken.append(chosen)
        self._staleness += [version - group.version for group in self.queue.close(chosen)]
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

    # ---- what it says of a step -----------------------------------------------------------------------------------

    def groups_line(self, step: int, phases: list[tuple[str, float, float]]) -> str | None:
        if not self.schedule.taken or self.schedule.step != step:
            return None
        return self.schedule.line(timeline_of(phases, self.timeline.pop()))

    def metrics(self, batch: StepBatch, version: int) -> dict[str, float]:
        """Return ``partial/...`` since the last call: groups, what was resumed, and ages in policy versions."""
        ages = torch.from_numpy((version - batch.per_token["policy_versions"])[batch.per_token["response_mask"]])
        of_tokens = batch.step.moments(ages)
        groups = self.queue.open.values()
        num_resumed, self._num_resumed = self._num_resumed, 0
        num_read, self._num_reprefilled = self._num_reprefilled, 0
        num_late, self._num_late = self._num_late, 0
        return {
            "partial/resumed": float(num_resumed),
            "partial/reprefilled_tokens": float(num_read),
            "partial/timed_out": float(num_late),
            "partial/groups_in_flight": float(len(groups)),
            "partial/groups_complete": float(sum(group.is_complete for group in groups)),
            "partial/age_mean": of_tokens.mean,
            "partial/age_max": of_tokens.largest if of_tokens.count else 0.0,
            "partial/previous_share": batch.step.mean((ages > 0).double()),
            **self._staleness_metrics(),
        }

    def _staleness_metrics(self) -> dict[str, float]:
        """Return the staleness of the groups released since the last call; with a bound, its histogram too."""
        found, self._staleness = self._staleness, []
        metrics = {
            "partial/staleness_mean": statistics.fmean(found) if found else 0.0,
            "partial/staleness_max": float(max(found, default=0)),
        }
        for staleness in range((self.queue.max_staleness or -1) + 1):
            metrics[f"partial/staleness_{staleness}"] = found.count(staleness) / max(len(found), 1)
        return metrics

    # ---- between steps --------------------------------------------------------------------------------------------

    def pop_metrics(self) -> dict[str, float]:
        return super().pop_metrics() | self._rules.pop_metrics()

    def close(self) -> None:
        self._rules.close()
        super().close()

    # ---- in a checkpoint ------------------------------------------------------------------------------------------

    def check(self, engine: RolloutEngine, algorithm: Algorithm, max_new_tokens: int, updates: tuple[int, int]) -> None:
        manager = plugins()
        engines = manager.registry.each("rollouts")
        check_partial_rollout(self.options, max_new_tokens, algorithm, engine, engines)
        if self.options.streams:
            callers = manager.call_order()["prepare_batch"]
            check_streaming(algorithm, updates, [each.plugin_name for each in callers if each.plugin_name != "rlplug"])

    def identify(self, seed: int | None, data: Mapping[str, Any], group_size: int, num_steps: int) -> None:
        """Say whose groups these are, and read those that ``replay`` repeats; see :meth:`RolloutSource.identify`."""
        queue = self.queue
        run = {"seed": seed, "data": fingerprint(data), "prompts_per_step": queue.groups_per_step}
        run |= {"group_size": group_size, "max_open": queue.max_open, "max_staleness": queue.max_staleness}
        self.schedule = GroupSchedule(run)
        if self.options.replay is not None:
            self.schedule = read_schedule(Path(self.options.replay), run, num_steps)

    def state_dict(self, gather: Callable[[Any], Any]) -> dict[str, Any]:
        """Return queue and trajectories of all engines as plain data, which later steps do not change. Collective."""
        own = [(number, [each.state_dict() for each in group]) for number, group in self.trajectories.items()]
        by_number = dict(gather(own))  # ranks that share an engine have the same groups
        return {"queue": self.queue.state_dict(), "trajectories": dict(sorted(by_number.items()))}

    def load_state_dict(
        self,
        state: Mapping[str, Any] | None,
        prompts: Mapping[str, Prompt],
        version: int,
        max_new_tokens: int,
        turns: TurnOptions,
    ) -> None:
        if state is None:
            return
        uids = {each["prompt"] for group in state["trajectories"].values() for each in group}
        if missing := sorted(uids - prompts.keys()):
            raise ConfigError(
                f"The checkpoint has groups in flight of {len(missing)} prompts that data.train has not any more, such "
                f"as {missing[0]!r}: resume with the data.train of the run that wrote the checkpoint."
            )
        self.queue.load_state_dict(state["queue"])
        self.trajectories = {
            number: [Trajectory.from_state(each, prompts[each["prompt"]]) for each in group]
            for number, group in state["trajectories"].items()
        }
        self._staleness = []
        _check_lengths(self.all_trajectories, max_new_tokens, turns.max_tokens_per_turn)
        if not self.queue.is_in_time(version):
            raise ConfigError(
                f"The checkpoint has {len(self.queue.open)} groups in flight, which cannot all train within "
                f"model.partial_rollout.max_staleness {self.queue.max_staleness} with model.batch.prompts_per_step "
                f"{self.queue.groups_per_step}: resume with those of the run that wrote the checkpoint."
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


def num_in_flight(options: PartialRollout, prompts_per_step: int) -> int:
    """Return how many groups are worked on at once."""
    if options.over_provisioning is not None:
        return math.ceil(options.over_provisioning * prompts_per_step)
    if options.bound is not None:
        return (options.bound + 1) * prompts_per_step
    return options.groups_in_flight or prompts_per_step
