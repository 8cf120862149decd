"""Options of multi-turn trajectories and of partial rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from rlplug.types.ranges import Count, Range, Seconds, Tokens, check_ranges

GROUPS: Final = "groups.jsonl"
"""File of a run's folder with the groups on which each step trained."""


@dataclass(frozen=True)
class TurnOptions:
    """Limits of a trajectory with an environment; ``sampling.max_new_tokens`` bounds turns and observations together.

    Args:
        max_turns: Most turns of the policy; after the last one the trajectory counts as truncated.
        max_tokens_per_turn: Longest turn, in tokens; by default what the trajectory has left.
        step_deadline_s: Longest time of one call of an environment, in seconds; a longer call fails its trajectory.
        max_concurrency: Environments that are called at a time, per engine.
    """

    max_turns: Count = 8
    max_tokens_per_turn: Tokens | None = None
    step_deadline_s: Seconds = 60.0
    max_concurrency: Annotated[int, Range(1, 10_000)] = 256

    def __post_init__(self) -> None:
        check_ranges(self, "model.turns")


@dataclass(frozen=True)
class PartialRollout:
    """Limits on how much of a trajectory one step generates; unfinished trajectories resume in the next step.

    A step trains on the groups that are complete, oldest first. Limits of tokens and seconds are those of Kimi Team,
    "Kimi k1.5: Scaling Reinforcement Learning with LLMs", arXiv:2501.12599, section 2.6.2. ``over_provisioning`` is
    that of Zhou et al., "APRIL: Active Partial Rollouts in Reinforcement Learning to Tame Long-tail Generation",
    arXiv:2509.18521, with a bound on staleness. ``asynchronous`` is that of Fu et al., "AReaL: A Large-Scale
    Asynchronous Reinforcement Learning System for Language Reasoning", arXiv:2505.24298, with a bound that no group
    exceeds, whatever order groups end in.

    Args:
        asynchronous: Generate while the policy trains, with an engine on devices of its own that streams. Each step
            cuts what runs, sends the new weights, goes on with the tokens so far, and trains as soon as enough groups
            are complete. A resumed run is no exact repetition.
        over_provisioning: Groups that are generated at once, as a multiple of ``batch.prompts_per_step``, above 1. A
            step stops to generate when enough groups are complete; needs an engine that streams. The tokens of a step
            then depend on the machine's speed, so a resumed run is no exact repetition. With ``asynchronous`` it is by
            default as much as ``max_staleness`` allows.
        max_staleness: With ``over_provisioning`` or ``asynchronous``: most policy versions between the start of a group
            and the step that trains on it; by default 2. A step waits for groups that would grow too old. With
            ``asynchronous``, 0 is exactly on-policy: forward and backward passes run over the step's complete groups
            while its others are generated.
        max_tokens_per_step: Most tokens that one trajectory gets in one step.
        max_seconds_per_step: Time after which a step stops to generate, in seconds; needs an engine that streams. The
            tokens of a step then depend on the machine's speed, so a resumed run is no exact repetition.
        trajectory_deadline_s: Longest time that engine and environment have for one trajectory, in seconds, its waiting
            in the engine included, and pauses of the generation not; by default there is no limit. One that takes
            longer is given up: it counts as a failed reward, and does not train. Needs an engine that streams.
        replay: File ``groups.jsonl`` of a previous run with ``asynchronous`` or ``over_provisioning``: each step trains
            on the groups on which that run's step did, and waits for them.
        groups_in_flight: Groups that are generated at once, those that wait to train included; by default
            ``batch.prompts_per_step``.
    """

    asynchronous: bool = False
    over_provisioning: Annotated[float, Range(1, 100, is_open=True)] | None = None
    max_staleness: Annotated[int, Range(0, 1000)] | None = None
    max_tokens_per_step: Tokens | None = None
    max_seconds_per_step: Seconds | None = None
    groups_in_flight: Count | None = None
    trajectory_deadline_s: Seconds | None = None
    replay: str | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "model.partial_rollout")

    @property
    def bound(self) -> int | None:
        """Most policy versions between start and training of a group; ``None`` where nothing bounds them."""
        if not self.asynchronous and self.over_provisioning is None:
            return None
        return 2 if self.max_staleness is None else self.max_staleness

    @property
    def streams(self) -> bool:
        """Whether a step's passes run over its complete groups while its others are generated."""
        return self.bound == 0
