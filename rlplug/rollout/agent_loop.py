"""The agent loop: generates turns and environment steps until each trajectory is finished or out of its step budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.engines import check_list
from rlplug.interfaces.checks.process_state import watched
from rlplug.interfaces.rollout import EngineFault, PolicySpec, RolloutEngine
from rlplug.observability.phase_progress import PHASE_PROGRESS, PhaseProgress
from rlplug.rollout.completion_checks import CompletionChecks
from rlplug.rollout.turns.trajectory_turns import TrajectoryTurns, TurnRules

if TYPE_CHECKING:
    from rlplug.rollout.config import PartialRollout
    from rlplug.rollout.engine_driver import EngineDriver
    from rlplug.rollout.ranks import EngineRanks
    from rlplug.rollout.trajectory import Trajectory
    from rlplug.rollout.turns.environment_calls import EnvironmentCalls
    from rlplug.rollout.turns.step_answer import StepAnswer
    from rlplug.types import Completion, Request, RewardError, SamplingParams

COLLECT_S: Final = 1.0
"""Longest wait for the engine, or for environments, at a time, in seconds."""


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

    The engine generates the next turns of all trajectories together, and then their environments step together. One
    that streams continues each as soon as its environment has returned; see ``StreamingLoop``.

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
        *,
        step: GenerationStep = WHOLE_STEP,
    ) -> None:
        self.sampling = sampling
        per_step = None if step.partial is None else step.partial.max_tokens_per_step
        self._turns = TrajectoryTurns(trajectories, sampling.max_new_tokens, per_step, rules, step.progress)
        self._checks = CompletionChecks(self._turns.most_tokens, policy, version, rules.stop)
        self._version = version
        self._environments = rules.environments
        self._ranks = ranks
        self._trajectories = trajectories
        self._progress = step.progress

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
        """Generate in rounds until no trajectory wants more tokens; after an ``EngineFault`` they have what came."""
        if self._environments is not None:
            self._step_environments([each for each in self.unfinished if each.awaits_answer], self._environments)
        while unfinished := self.unfinished:
            requests, fault, disorder = [self._request(trajectory) for trajectory in unfinished], None, None
            call = PluginCall(engine, "generate")
            try:
                with watched(call):
                    completions = check_list(call, engine.generate(requests, self.sampling))
                if [each.request_id for each in completions] != [each.request_id for each in requests]:
                    from rlplug.rollout.answer_checks import order_fault

                    disorder = order_fault(call, completions, [each.request_id for each in requests])
            except EngineFault as problem:
                completions, fault = problem.completions, problem
            self._progress.in_call(0, 0)  # each is counted when it is received
            running = {trajectory.request_id: trajectory for trajectory in unfinished}
            accepted, refusal = self._checks.accept(call, completions, running)
            fault = fault or disorder or refusal
            if fault is None and self._is_stopped(engine, [completion for _, completion in accepted]):
                return
            fault = fault or unasked_abort(call, [completion for _, completion in accepted])
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
        def step() -> dict[str, StepAnswer | RewardError]:
            environments.submit(ended, self.sampling.max_new_tokens)
            results: dict[str, StepAnswer | RewardError] = {}
            while environments.num_pending:
                results |= {trajectory.key: result for trajectory, result in environments.collect(COLLECT_S)}
            return results

        results = self._ranks.from_first(step)
        for trajectory in ended:
            self._turns.apply(trajectory, results[trajectory.key])

    # ---- requests -------------------------------------------------------------------------------------------------

    def _wants_more(self, trajectory: Trajectory) -> bool:
        return self._turns.wants_more(trajectory)

    def _request(self, trajectory: Trajectory) -> Request:
        return trajectory.request(self._turns.most_tokens(trajectory))


def unasked_abort(call: PluginCall, completions: Sequence[Completion]) -> EngineFault | None:
    """Return the fault of an engine that aborted a request on its own: nothing would ask for the rest."""
    for completion in completions:
        if completion.finish_reason == "abort":
            return EngineFault(f"{call} aborted request {completion.request_id}, on its own.")
    return None
