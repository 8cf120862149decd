"""Turns of trajectories: how many tokens each request may have, and what completions and observations add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlplug.types import RewardError

if TYPE_CHECKING:
    from rlplug.observability.phase_progress import PhaseProgress
    from rlplug.rollout.config import TurnOptions
    from rlplug.rollout.trajectory import Trajectory
    from rlplug.rollout.turns.environment_calls import EnvironmentCalls
    from rlplug.rollout.turns.observation_tokens import ObservationTokens
    from rlplug.rollout.turns.step_answer import StepAnswer
    from rlplug.rollout.turns.stop_strings import StopStrings
    from rlplug.types import Completion


@dataclass(frozen=True)
class TurnRules:
    """What follows a turn of a trajectory."""

    options: TurnOptions
    environments: EnvironmentCalls | None = None
    """The environments that answer; ``None`` for completions of a single turn."""
    observations: ObservationTokens | None = None
    """Turns an environment's observation into tokens."""
    stop: StopStrings | None = None
    """Ends a turn at a string; ``None`` where no string does."""

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of the environments since the last call; none of a single turn."""
        return {} if self.environments is None else self.environments.pop_metrics()

    def close(self) -> None:
        """Close the environments; safe to call twice."""
        if self.environments is not None:
            self.environments.close()


class TrajectoryTurns:
    """Turns of some trajectories in one step, which grow by them until they end or have no budget left.

    Args:
        trajectories: The trajectories, which grow in place.
        max_new_tokens: Most tokens of a trajectory after its prompt.
        max_tokens_per_step: Most tokens that the step generates for each trajectory.
        rules: What follows a turn.
        progress: Counts what is generated.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        max_new_tokens: int,
        max_tokens_per_step: int | None,
        rules: TurnRules,
        progress: PhaseProgress,
    ) -> None:
        self._max_new_tokens = max_new_tokens
        self._step_budget = {trajectory.key: max_tokens_per_step or max_new_tokens for trajectory in trajectories}
        """Tokens that this step may still generate for each trajectory."""
        self._options = rules.options
        self._environments = rules.environments
        self._observations = rules.observations
        self._progress = progress

    def wants_more(self, trajectory: Trajectory) -> bool:
        """Return whether a trajectory is unfinished and has some of the step's budget left."""
        return trajectory.finish_reason is None and self._step_budget[trajectory.key] > 0

    def most_tokens(self, trajectory: Trajectory) -> int:
        """Return how many tokens a trajectory's next request may generate."""
        return min(self._step_budget[trajectory.key], self._turn_budget(trajectory))

    def _turn_budget(self, trajectory: Trajectory) -> int:
        """Return how many more tokens the turn may have, apart from the step's budget."""
        budget = self._max_new_tokens - trajectory.num_after_prompt
        if self._options.max_tokens_per_turn is None:
            return budget
        return min(budget, self._options.max_tokens_per_turn - trajectory.num_in_turn)

    def receive(self, trajectory: Trajectory, completion: Completion) -> bool:
        """Append the engine's completion; return whether it ends a turn, so that an environment steps."""
        num_tokens, step_budget = len(completion.token_ids), self._step_budget[trajectory.key]
        reason = completion.finish_reason
        if reason == "abort" and num_tokens == self.most_tokens(trajectory):
            reason = "length"  # the abort came after the last token
        is_long = reason == "length"
        is_open = (is_long and num_tokens == step_budget < self._turn_budget(trajectory)) or reason == "abort"
        is_at_turn_limit = trajectory.num_in_turn + num_tokens == self._options.max_tokens_per_turn
        self._step_budget[trajectory.key] = step_budget - num_tokens
        self._progress.advance(num_tokens=num_tokens)
        if num_tokens or not is_open:
            trajectory.add_completion(completion, ends_turn=not is_open)
        if is_open:
            return False
        if self._environments is None:
            trajectory.finish_reason = reason
            self._progress.advance(1)
            return False
        trajectory.turn_was_cut = is_long and not is_at_turn_limit
        trajectory.awaits_answer = True
        return True

    def apply(self, trajectory: Trajectory, answer: StepAnswer | RewardError) -> None:
        """Append the observation of an environment's step and add its reward, or end the trajectory."""
        trajectory.awaits_answer = False
        if isinstance(answer, RewardError):
            trajectory.error, trajectory.error_kind, trajectory.finish_reason = answer.message, answer.kind, "abort"
        else:
            trajectory.reward += answer.reward
            if answer.done:
                trajectory.finish_reason = "length" if trajectory.turn_was_cut else "stop"
            else:
                self._observe(trajectory, answer.text)
        if trajectory.finish_reason is not None:
            self._end(trajectory)

    def give_up(self, trajectory: Trajectory, error: str) -> None:
        """End an unfinished trajectory that is not to train, with the tokens so far."""
        trajectory.give_up(error)
        self._end(trajectory)

    def _end(self, trajectory: Trajectory) -> None:
        self._progress.advance(1)
        if self._environments is not None:
            self._environments.release(trajectory)

    def _observe(self, trajectory: Trajectory, text: str | None) -> None:
        """Append an observation, or end the trajectory where no further turn fits."""
        assert self._observations is not None
        if trajectory.num_turns == self._options.max_turns or text is None:
            trajectory.finish_reason = "length"
            return
        token_ids = self._observations.after(int(trajectory.token_ids[-1]), text)
        if self._max_new_tokens - trajectory.num_after_prompt - len(token_ids) < 1:
            trajectory.finish_reason = "length"
        else:
            trajectory.add_observation(token_ids)
