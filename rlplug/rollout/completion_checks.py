"""Checks the completions that an engine returns, before the agent loop appends them to trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.engines import SourceOfTokens, are_sound
from rlplug.interfaces.rollout import EngineFault, PolicySpec, RolloutEngine
from rlplug.rollout.trajectory import Trajectory
from rlplug.types import Completion

if TYPE_CHECKING:
    from rlplug.rollout.turns.stop_strings import StopStrings


@dataclass(frozen=True)
class CompletionChecks:
    """What the completions of a run's engine must keep.

    Args:
        most_tokens: Returns how many tokens were asked for, for a trajectory.
        policy: Has the vocabulary, the end tokens, and the routers whose experts completions must have.
        version: Version of the weights that the engine got last.
        stop: Cuts completions at the run's stop strings; ``None`` without any.
    """

    most_tokens: Callable[[Trajectory], int]
    policy: PolicySpec
    version: int
    stop: StopStrings | None = None

    def accept(
        self, call: PluginCall, completions: Sequence[Completion], running: dict[str, Trajectory]
    ) -> tuple[list[tuple[Trajectory, Completion]], EngineFault | None]:
        """Check completions, and take their trajectories out of ``running``; return them, and the first fault.

        Args:
            call: The engine's call that returned the completions.
            completions: What it returned.
            running: Trajectories of the open requests, by the request's id.
        """
        engine: RolloutEngine = call.part
        known = [each for each in completions if each.request_id in running]
        limits = [self.most_tokens(running[each.request_id]) for each in known]
        is_sound = are_sound(known, limits, self.policy, self.version, engine.capabilities.logprobs)
        accepted, fault = list[tuple[Trajectory, Completion]](), None
        for completion in completions:
            if (trajectory := running.get(completion.request_id)) is None:
                fault = fault or EngineFault(f"{call} returned {completion.request_id!r}, which is no open request.")
                continue
            source = SourceOfTokens(call, completion.request_id)
            try:
                if not is_sound:
                    self._check(source, trajectory, completion, engine.capabilities.logprobs)
                checked = self._with_checked_experts(source, trajectory, self._with_end(completion))
                checked = checked if self.stop is None else self.stop.cut(source, trajectory, checked)
            except EngineFault as problem:
                fault = fault or problem
            else:
                accepted.append((running.pop(completion.request_id), checked))
        return accepted, fault

    def _check(self, source: SourceOfTokens, trajectory: Trajectory, completion: Completion, logprobs: bool) -> None:
        from rlplug.rollout.answer_checks import check_completion, check_tokens

        tokens = (completion.token_ids, completion.logprobs, self.most_tokens(trajectory))
        check_tokens(source, *tokens, self.policy.vocab_size, logprobs)
        check_completion(source, completion, self.policy, self.version)

    def _with_end(self, completion: Completion) -> Completion:
        """Return a completion as stopped that was aborted with its end token: nothing may follow that."""
        if completion.finish_reason != "abort" or not len(completion.token_ids):
            return completion
        is_ended = int(completion.token_ids[-1]) in self.policy.eos_token_ids
        return replace(completion, finish_reason="stop") if is_ended else completion

    def _with_checked_experts(
        self, source: SourceOfTokens, trajectory: Trajectory, completion: Completion
    ) -> Completion:
        """Check the experts of a completion, or remove them where the run replays none."""
        routers = self.policy.routers
        if routers is None:
            return completion if completion.routed_experts is None else replace(completion, routed_experts=None)
        from rlplug.rollout.routed_experts import check_routed_experts

        num_tokens = len(trajectory.token_ids) + len(completion.token_ids)
        experts = check_routed_experts(str(source), completion.routed_experts, num_tokens, routers)
        return replace(completion, routed_experts=experts)
