"""Options of multi-turn trajectories and of partial rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from rlplug.errors import ConfigError


@dataclass(frozen=True)
class TurnOptions:
    """Limits of a trajectory with an environment; ``sampling.max_new_tokens`` bounds turns and observations together.

    Args:
        max_turns: Most turns of the policy; after the last one the trajectory counts as truncated.
        max_tokens_per_turn: Longest turn, in tokens; by default what the trajectory has left.
        step_deadline_s: Longest time of one call of an environment, in seconds; a longer call fails its trajectory.
        max_concurrency: Environments that are called at a time, per engine.
    """

    max_turns: int = 8
    max_tokens_per_turn: int | None = None
    step_deadline_s: float = 60.0
    max_concurrency: int = 256

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.turns.{name} is {getattr(self, name)}: give at least 1.")
        if self.max_tokens_per_turn is not None and self.max_tokens_per_turn < 1:
            raise ConfigError(
                f"model.turns.max_tokens_per_turn is {self.max_tokens_per_turn}: give at least 1, or null for no limit."
            )
        if not self.step_deadline_s > 0:
            raise ConfigError(f"model.turns.step_deadline_s is {self.step_deadline_s}: give a number of seconds.")


@dataclass(frozen=True)
class PartialRollout:
    """Limits on how much of a trajectory one step generates; unfinished trajectories resume in the next step.

    A step trains on the groups that are complete, oldest first. The method is that of Kimi Team, "Kimi k1.5: Scaling
    Reinforcement Learning with LLMs", arXiv:2501.12599, section 2.6.2.

    Args:
        max_tokens_per_step: Most tokens that one trajectory gets in one step.
        max_seconds_per_step: Time after which a step stops to generate, in seconds; needs an engine that streams. The
            tokens of a step then depend on the machine's speed, so a resumed run is no exact repetition.
        groups_in_flight: Groups that are generated at once, those that wait to train included; by default
            ``batch.prompts_per_step``.
    """

    max_tokens_per_step: int | None = None
    max_seconds_per_step: float | None = None
    groups_in_flight: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens_per_step is None and self.max_seconds_per_step is None:
            raise ConfigError(
                "model.partial_rollout has no limit: set max_tokens_per_step or max_seconds_per_step, or remove it."
            )
        for name in ("max_tokens_per_step", "max_seconds_per_step", "groups_in_flight"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"model.partial_rollout.{name} is {value}: give a positive number, or remove it.")
