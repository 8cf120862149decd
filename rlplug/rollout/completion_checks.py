"""Checks the completions that an engine returns, before the agent loop appends them to trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlplug.interfaces.rollout import EngineFault, RolloutEngine
from rlplug.interfaces.router_replay import RouterShape
from rlplug.rollout.engines.answer_checks import check_tokens
from rlplug.rollout.engines.finish_reasons import as_finish_reason
from rlplug.rollout.routed_experts import check_routed_experts
from rlplug.rollout.trajectory import Trajectory
from rlplug.types import Completion


@dataclass(frozen=True)
class CompletionChecks:
    """What the completions of a run's engine must keep.

    Args:
        most_tokens: Returns how many tokens were asked for, for a trajectory.
        vocab_size: Tokens that the policy embeds; ``None`` where it is not known.
        routers: Routers whose experts completions must have; ``None`` where the run replays none.
    """

    most_tokens: Callable[[Trajectory], int]
    vocab_size: int | None
    routers: RouterShape | None

    def accept(
        self, engine: RolloutEngine, completions: Sequence[Completion], running: dict[str, Trajectory]
    ) -> tuple[list[tuple[Trajectory, Completion]], EngineFault | None]:
        """Check completions, and take their trajectories out of ``running``; return them, and the first fault."""
        name, accepted, fault = type(engine).__name__, list[tuple[Trajectory, Completion]](), None
        for completion in completions:
            if (trajectory := running.get(completion.request_id)) is None:
                fault = fault or EngineFault(f"{name} returned {completion.request_id!r}, which is no open request.")
                continue
            source = f"{name}, at request {completion.request_id},"
            try:
                as_finish_reason(name, completion.request_id, completion.finish_reason)
                tokens = (completion.token_ids, completion.logprobs, self.most_tokens(trajectory))
                check_tokens(source, *tokens, self.vocab_size, engine.capabilities.logprobs)
                checked = self._with_checked_experts(source, trajectory, completion)
            except EngineFault as problem:
                fault = fault or problem
            else:
                accepted.append((running.pop(completion.request_id), checked))
        return accepted, fault

    def _with_checked_experts(self, source: str, trajectory: Trajectory, completion: Completion) -> Completion:
        """Check the experts of a completion, or remove them where the run replays none."""
        if self.routers is None:
            return completion if completion.routed_experts is None else replace(completion, routed_experts=None)
        num_tokens = len(trajectory.token_ids) + len(completion.token_ids)
        experts = check_routed_experts(source, completion.routed_experts, num_tokens, self.routers)
        return replace(completion, routed_experts=experts)
