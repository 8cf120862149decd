"""The agent loop: generates turns and environment steps until each trajectory is finished or out of its step budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.engines import check_list, order_fault
from rlplug.interfaces.checks.process_state import watched
from rlplug.interfaces.rollout import EngineFault, PolicySpec, RolloutEngine
from rlplug.observability.phase_progress import PHASE_PROGRESS, PhaseProgress
from rlplug.rollout.completion_checks import CompletionChecks
from rlplug.rollout.turns.trajectory_turns import TrajectoryTurns, TurnRules

if TYPE_CHECKING:
    from rlplug.rollout.config import PartialRollout
    from rlplug.rollout.deadlines import TrajectoryDeadlines
    from rlplug.rollout.engine_driver import EngineDriver
    from rlplug.rollout.ranks import EngineRanks
    from rlplug.rollout.trajectory import Trajectory
    from rlplug.rollout.turns.environment_calls import EnvironmentCalls
    from rlplug.rollout.turns.step_answer import Failure, StepAnswer
    from rlplug.types import Completion, Request, SamplingParams

COLLECT_S: Final = 1.0
"""Longest wait for the engine, or for environments, at a time, in seconds."""
COLLECT_BRIEFLY_S: Final = 0.02
"""Longest wait for the engine while environments are stepping, or other engines may complete what is wanted."""


@dataclass(frozen=True)
class GenerationStep:
    """How a step generates: what ends it before all trajectories are finished, and which are drawn in another way."""

    partial: PartialRollout | None = None
    """Limits on how much of a trajectory the step generates."""
    is_enough: Callable[[], bool] | None = None
    """Returns whether the step has the groups that it wants, so that what runs is broken off."""
    other_sampling: Mapping[str, SamplingParams] = field(default_factory=dict)
    """How some trajectories are drawn, by key, such as those of a validation; needs an engine that streams."""
    count_requests: Callable[[int, int], None] | None = None
    """Gets the numbers of requests in flight where an engine streams, those of ``other_sampling`` apart."""
    progress: PhaseProgress = PHASE_PROGRESS
    """Counts what is generated."""


WHOLE_STEP: Final = GenerationStep()
"""A step that generates until all its trajectories are finished."""


class AgentLoop:
    """Generates the turns of some trajectories and steps their environments, until none wants more tokens.

    An engine that streams continues each trajectory as soon as its environment has returned. Any other engine generates
    the next turns of all trajectories together, and then their environments step together.

    Args:
        trajectories: The trajectories, which grow in place.
        sampling: How tokens are drawn; ``max_new_tokens`` bounds all of a trajectory after its prompt.
        rules: What follows a turn.
        policy: What the engine was told about the policy, against which completions are checked.
        version: Version of the policy whose weights generate.
        ranks: The ranks that share the engine; the first one's environments decide for all.
        step: How the step generates.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        sampling: SamplingParams,
        rules: TurnRules,
        policy: PolicySpec,
        version: int,
        ranks: EngineRanks,
        step: GenerationStep = WHOLE_STEP,
    ) -> None:
        self.sampling = sampling
        self._other_sampling = step.other_sampling
        partial = step.partial
        per_step = None if partial is None else partial.max_tokens_per_step
        self._turns = TrajectoryTurns(trajectories, sampling.max_new_tokens, per_step, rules, step.progress)
        self._checks = CompletionChecks(self._turns.most_tokens, policy, version)
        self._version = version
        self._environments = rules.environments
        self._ranks = ranks
        self._trajectories = trajectories
        self._max_seconds = None if partial is None else partial.max_seconds_per_step
        self._deadline_s = None if partial is None else partial.trajectory_deadline_s
        self._is_enough = step.is_enough
        self._count_requests = step.count_requests
        self._progress = step.progress
        self._ends_at = float("inf")

    @property
    def unfinished(self) -> list[Trajectory]:
        """Trajectories that want more tokens in this step."""
        return [trajectory for trajectory in self._trajectories if self._wants_more(trajectory)]

    def run(self, driver: EngineDriver) -> None:
        """Generate with this rank's engine; after a fault on any rank, restart the engines and continue. Collective.

        Raises:
            RunError: An engine failed and cannot restart, or has used up its restarts.
            StopRequested: The run is told to stop.
        """

        def generate() -> None:
            with driver.ready_engine(self._version) as engine:
                self._generate(engine)

        is_single_turn = self._environments is None
        unit = "completions" if is_single_turn else "trajectories"
        self._progress.expect(len(self._trajectories), unit, counts_calls=is_single_turn)
        driver.with_restarts(generate, num_missing=lambda: len(self.unfinished))
        driver.finish()

    def _generate(self, engine: RolloutEngine) -> None:
        """Generate until no trajectory wants more tokens.

        Raises:
            EngineFault: The engine failed; what it had completed is in the trajectories.
        """
        if self._max_seconds is not None and self._ends_at == float("inf"):
            self._ends_at = time.monotonic() + self._max_seconds
        breaks_off = any(limit is not None for limit in (self._max_seconds, self._is_enough, self._deadline_s))
        if (breaks_off or self._environments is not None) and engine.capabilities.streaming:
            self.stream(engine)
        else:
            self._generate_rounds(engine)

    # ---- in rounds ------------------------------------------------------------------------------------------------

    def _generate_rounds(self, engine: RolloutEngine) -> None:
        if self._environments is not None:
            self._step_environments([each for each in self.unfinished if each.awaits_answer], self._environments)
        while unfinished := self.unfinished:
            requests, fault, disorder = [self._request(trajectory) for trajectory in unfinished], None, None
            call = PluginCall(engine, "generate")
            try:
                with watched(call):
                    completions = check_list(call, engine.generate(requests, self.sampling))
                disorder = order_fault(call, completions, [request.request_id for request in requests])
            except EngineFault as problem:
                completions, fault = problem.completions, problem
            self._progress.in_call(0, 0)  # each is counted when it is received
            running = {trajectory.request_id: trajectory for trajectory in unfinished}
            accepted, refusal = self._checks.accept(call, completions, running)
            fault = fault or disorder or refusal
            if fault is None and self._is_stopped(engine, [completion for _, completion in accepted]):
                return
            fault = fault or _unasked_abort(call, [completion for _, completion in accepted])
            ended = [trajectory for trajectory, completion in accepted if self._turns.receive(trajectory, completion)]
            if self._environments is not None:
                self._step_environments(ended, self._environments)
            if fault is not None:
                raise fault

    def _is_stopped(self, engine: RolloutEngine, completions: Sequence[Completion]) -> bool:
        """Return whether completions are incomplete because the run is told to stop, alike on ranks of one engine."""
        is_aborted = any(completion.finish_reason == "abort" for completion in completions)
        return is_aborted and (self._ranks.size > 1 or engine.is_stopping())

    def _step_environments(self, ended: Sequence[Trajectory], environments: EnvironmentCalls) -> None:
        def step() -> dict[str, StepAnswer | Failure]:
            environments.submit(ended, self.sampling.max_new_tokens)
            results: dict[str, StepAnswer | Failure] = {}
            while environments.num_pending:
                results |= {trajectory.key: result for trajectory, result in environments.collect(COLLECT_S)}
            return results

        results = self._ranks.from_first(step)
        for trajectory in ended:
            self._turns.apply(trajectory, results[trajectory.key])

    # ---- streaming ------------------------------------------------------------------------------------------------

    def stream(self, engine: RolloutEngine) -> None:
        """Generate with an engine that streams, until all is done or broken off.

        What is broken off has its tokens so far. Environments that still step are not waited for then: they answer in a
        later call, of this loop or of another one with the same trajectories and environments.

        Raises:
            EngineFault: The engine failed; what it had completed is in the trajectories.
        """
        from rlplug.rollout.deadlines import TrajectoryDeadlines

        deadlines = TrajectoryDeadlines(self._trajectories, self._deadline_s)
        try:
            self._stream(engine, deadlines)
        finally:
            deadlines.note(is_last=True)

    def _stream(self, engine: RolloutEngine, deadlines: TrajectoryDeadlines) -> None:
        running: dict[str, Trajectory] = {}
        is_aborted, call = False, PluginCall(engine, "collect")
        self._end_if_enough()
        ready = self._ready_at_first()
        while True:
            deadlines.note()
            self._count(running)
            is_over = self._seconds_left <= 0 or engine.is_stopping()
            ready = [] if is_over else self._in_time(ready)
            if not (running or ready or (self._num_stepping and not is_over)):
                return
            running |= {trajectory.request_id: trajectory for trajectory in ready}
            self._count(running)
            completions: Sequence[Completion] = []
            fault: EngineFault | None = None
            try:
                for sampling, some in self._by_sampling(ready):
                    engine.submit([self._request(trajectory) for trajectory in some], sampling)
                if running and is_over and not is_aborted:
                    engine.abort(list(running))
                    is_aborted = True
                elif late := deadlines.to_abort(running):
                    engine.abort(late)
                if running:
                    completions = check_list(call, engine.collect(self._wait_s(self._num_stepping > 0)))
            except EngineFault as problem:
                completions, fault = problem.completions, problem
            accepted, refusal = self._checks.accept(call, completions, running)
            if is_aborted:  # while one that the engine keeps is waited for, the others are paused
                deadlines.leave([trajectory for trajectory, _ in accepted])
            ended = [trajectory for trajectory, completion in accepted if self._turns.receive(trajectory, completion)]
            if self._environments is not None:
                self._environments.submit(ended, self.sampling.max_new_tokens)
            if not (is_aborted or engine.is_stopping()):
                refusal = refusal or _unasked_abort(call, [each for owner, each in accepted if not owner.is_late])
            if fault := fault or refusal or deadlines.fault_of(engine, running):
                raise fault
            self._in_time([trajectory for trajectory, _ in accepted if not trajectory.awaits_answer])
            stepped = self._collect_steps(0.0 if running else self._wait_s(False))
            self._end_if_enough()
            ready = [trajectory for trajectory in stepped if self._wants_more(trajectory)]

    def _count(self, running: dict[str, Trajectory]) -> None:
        if self._count_requests is not None:
            others = self._other_sampling
            num_others = sum(each.key in others for each in running.values()) if others else 0
            self._count_requests(len(running) - num_others, num_others)

    def _in_time(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Give up the unfinished ones of some trajectories that are late, and return the others."""
        for trajectory in trajectories:
            if trajectory.is_late and trajectory.finish_reason is None:
                key = "model.partial_rollout.trajectory_deadline_s"
                self._turns.give_up(trajectory, f"took longer than {key} ({self._deadline_s:g} s)")
        return [trajectory for trajectory in trajectories if trajectory.finish_reason is None]

    def _ready_at_first(self) -> list[Trajectory]:
        """Return the trajectories that want tokens; have environments answer that were not asked in this process."""
        unfinished = self.unfinished
        if self._environments is not None:
            asked = self._environments.pending_keys
            again = [each for each in unfinished if each.awaits_answer and each.key not in asked]
            self._environments.submit(again, self.sampling.max_new_tokens)
        return [trajectory for trajectory in unfinished if not trajectory.awaits_answer]

    def _wait_s(self, others_may_come: bool) -> float:
        """Return the longest wait at a time, in seconds."""
        return COLLECT_BRIEFLY_S if others_may_come or self._is_enough is not None else COLLECT_S

    def _end_if_enough(self) -> None:
        """End the step's time once it has the groups that it wants."""
        if self._is_enough is not None and self._is_enough():
            self._ends_at = 0.0

    @property
    def _num_stepping(self) -> int:
        return 0 if self._environments is None else self._environments.num_pending

    def _collect_steps(self, timeout_s: float) -> list[Trajectory]:
        """Apply the results of environments that have returned, and return their trajectories."""
        if self._environments is None:
            return []
        results = self._environments.collect(timeout_s)
        for trajectory, result in results:
            self._turns.apply(trajectory, result)
        return [trajectory for trajectory, _ in results]

    # ---- requests -------------------------------------------------------------------------------------------------

    @property
    def _seconds_left(self) -> float:
        return self._ends_at - time.monotonic()

    def _wants_more(self, trajectory: Trajectory) -> bool:
        return self._turns.wants_more(trajectory) and self._seconds_left > 0

    def _by_sampling(self, trajectories: Sequence[Trajectory]) -> Iterator[tuple[SamplingParams, list[Trajectory]]]:
        """Yield the trajectories that are drawn alike; nothing for none."""
        found: dict[SamplingParams, list[Trajectory]] = {self.sampling: []}
        for trajectory in trajectories:
            found.setdefault(self._other_sampling.get(trajectory.key, self.sampling), []).append(trajectory)
        yield from ((sampling, some) for sampling, some in found.items() if some)

    def _request(self, trajectory: Trajectory) -> Request:
        return trajectory.request(self._turns.most_tokens(trajectory))


def _unasked_abort(call: PluginCall, completions: Sequence[Completion]) -> EngineFault | None:
    """Return the fault of an engine that aborted a request on its own: nothing would ask for the rest."""
    for completion in completions:
        if completion.finish_reason == "abort":
            return EngineFault(f"{call} aborted request {completion.request_id}, on its own.")
    return None
