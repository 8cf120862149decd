"""``StreamingLoop``, which continues each trajectory on its own, and deadlines of trajectories."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.engines import check_list
from rlplug.interfaces.rollout import EngineFault, RolloutEngine
from rlplug.rollout.agent_loop import COLLECT_S, WHOLE_STEP, AgentLoop, GenerationStep, unasked_abort
from rlplug.rollout.trajectory import Trajectory
from rlplug.types import Completion, SamplingParams

COLLECT_BRIEFLY_S: Final = 0.02
"""Longest wait for the engine while environments are stepping, or other engines may complete what is wanted."""
ABORT_S: Final = 60.0
"""Longest time for an engine to return a request that it is told to abort, in seconds."""


class TrajectoryDeadlines:
    """Measures how long trajectories are worked on, in one call of the agent loop's ``stream``.

    A trajectory's time passes while its request waits or runs in the engine, and while its environment steps. It stands
    still while generation is paused, and between processes.

    Args:
        trajectories: The trajectories, of which those that finish are left out from then on.
        deadline_s: Seconds after which a trajectory is late; ``None`` for no deadline.
    """

    def __init__(self, trajectories: Sequence[Trajectory], deadline_s: float | None) -> None:
        self._trajectories = list(trajectories)
        self._deadline_s = deadline_s
        self._noted_at = time.monotonic()
        self._asked_at: dict[str, float] = {}

    def note(self, is_last: bool = False) -> None:
        """Add the time since the last note to all trajectories, and mark those that are late.

        Args:
            is_last: Whether the call of ``stream`` ends; else a note that follows soon is left out, since it is cheap
                only for few trajectories.
        """
        now, deadline_s = time.monotonic(), self._deadline_s
        seconds = now - self._noted_at
        if deadline_s is None or (seconds < min(deadline_s / 20, 0.25) and not is_last):
            return
        self._noted_at = now
        self._trajectories = [each for each in self._trajectories if each.finish_reason is None]
        for trajectory in self._trajectories:
            trajectory.seconds += seconds
            trajectory.is_late = trajectory.seconds > deadline_s

    def leave(self, trajectories: Sequence[Trajectory]) -> None:
        """Let the time of some trajectories stand still from now on: they wait for the next call of ``stream``."""
        self.note(is_last=True)
        gone = {id(trajectory) for trajectory in trajectories}
        self._trajectories = [each for each in self._trajectories if id(each) not in gone]

    def to_abort(self, running: dict[str, Trajectory]) -> list[str]:
        """Return the ids of running requests whose trajectories are late, each once."""
        if self._deadline_s is None:
            return []
        late = [name for name, trajectory in running.items() if trajectory.is_late and name not in self._asked_at]
        self._asked_at |= dict.fromkeys(late, time.monotonic())
        return late

    def fault_of(self, engine: RolloutEngine, running: dict[str, Trajectory]) -> EngineFault | None:
        """Return the fault of an engine that should have returned a request long ago, if it keeps one."""
        latest = time.monotonic() - ABORT_S
        for name, asked_at in self._asked_at.items():
            if asked_at < latest and name in running:
                return EngineFault(
                    f"{type(engine).__name__} did not return aborted request {name} within {ABORT_S:g} s."
                )
        return None


class StreamingLoop(AgentLoop):
    """Agent loop that streams where the engine can, and there is an environment or something that ends the step early.

    Its arguments are those of :class:`AgentLoop`.
    """

    def __init__(self, *args: Any, step: GenerationStep = WHOLE_STEP, **kwargs: Any) -> None:
        super().__init__(*args, step=step, **kwargs)
        self._other_sampling = step.other_sampling
        self._max_seconds = None if step.partial is None else step.partial.max_seconds_per_step
        self._deadline_s = None if step.partial is None else step.partial.trajectory_deadline_s
        self._is_enough = step.is_enough
        self._count_requests = step.count_requests
        self._ends_at = float("inf")

    def _generate(self, engine: RolloutEngine) -> None:
        if self._max_seconds is not None and self._ends_at == float("inf"):
            self._ends_at = time.monotonic() + self._max_seconds
        breaks_off = any(limit is not None for limit in (self._max_seconds, self._is_enough, self._deadline_s))
        if (breaks_off or self._environments is not None) and engine.capabilities.streaming:
            self.stream(engine)
        else:
            super()._generate(engine)

    @property
    def _seconds_left(self) -> float:
        return self._ends_at - time.monotonic()

    def _wants_more(self, trajectory: Trajectory) -> bool:
        return super()._wants_more(trajectory) and self._seconds_left > 0

    def stream(self, engine: RolloutEngine) -> None:
        """Generate with an engine that streams, until all is done or broken off.

        What is broken off has its tokens so far. Environments that still step are not waited for then: they answer in a
        later call, of this loop or of another one with the same trajectories and environments.

        Raises:
            EngineFault: The engine failed; what it had completed is in the trajectories.
        """
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
                refusal = refusal or unasked_abort(call, [each for owner, each in accepted if not owner.is_late])
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

    def _by_sampling(self, trajectories: Sequence[Trajectory]) -> Iterator[tuple[SamplingParams, list[Trajectory]]]:
        """Yield the trajectories that are drawn alike; nothing for none."""
        found: dict[SamplingParams, list[Trajectory]] = {self.sampling: []}
        for trajectory in trajectories:
            found.setdefault(self._other_sampling.get(trajectory.key, self.sampling), []).append(trajectory)
        yield from ((sampling, some) for sampling, some in found.items() if some)
