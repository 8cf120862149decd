"""From prompts to samples: trajectories are made, shared out among engines, played, and handed on when complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlplug.distributed.mesh import rank_share
from rlplug.interfaces.environment import Environment
from rlplug.interfaces.rollout import Placement, PolicySpec
from rlplug.rollout.agent_loop import AgentLoop
from rlplug.rollout.config import PartialRollout, TurnOptions
from rlplug.rollout.engine_driver import EngineDriver
from rlplug.rollout.engines.ranks import EngineRanks
from rlplug.rollout.environment_calls import EnvironmentCalls
from rlplug.rollout.observation_tokens import ObservationTokens
from rlplug.rollout.partial_rollout import PartialRolloutState
from rlplug.rollout.trajectory import Trajectory, new_trajectories, to_samples
from rlplug.types import Prompt, Sample, SamplingParams


class RolloutGenerator:
    """Owns the environments of this rank's trajectories.

    Args:
        driver: Of this rank's engine.
        spec: The policy.
        placement: This rank.
        tokenizer: For the text of turns and samples.
        make_environment: Makes a trajectory's environment; ``None`` for completions of a single turn.
        options: Limits of turns.
        observations: From an environment's answer to tokens.
        gather: Returns the concatenation of all ranks' lists; collective.
    """

    def __init__(
        self,
        driver: EngineDriver,
        spec: PolicySpec,
        placement: Placement,
        tokenizer: PreTrainedTokenizerBase,
        make_environment: Callable[[], Environment] | None,
        options: TurnOptions,
        observations: ObservationTokens,
        gather: Callable[[Any], Any],
    ) -> None:
        self._driver = driver
        self._tokenizer = tokenizer
        self._options = options
        self._observations = observations
        self._gather = gather
        self._environments: EnvironmentCalls | None = None
        if make_environment is not None:
            self._environments = EnvironmentCalls(make_environment, tokenizer, spec.eos_token_ids, options)
        self._ranks = EngineRanks(placement, driver.engine.ranks_per_engine, communicates=make_environment is not None)

    def complete(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: SamplingParams,
        key: str,
        version: int,
        first_group: int = 0,
    ) -> list[Sample]:
        """Return ``num_samples`` completions of each of this rank's share of ``prompts``.

        Args:
            prompts: Of all ranks, the same list on each.
            num_samples: Of each prompt.
            sampling: How completions are drawn.
            key: Names run and step; seeds follow from it.
            version: Of the policy.
            first_group: Number of the first prompt's group; the next prompt has the next one.
        """
        ranks = self._ranks
        asked = rank_share(list(enumerate(prompts, start=first_group)), ranks.engine, ranks.num_engines)
        trajectories = new_trajectories([p for _, p in asked], [group for group, _ in asked], num_samples, key)
        self._play(trajectories, sampling, version)
        # ranks that share an engine divide what it returns, whole groups each
        mine = rank_share(range(len(asked)), ranks.index, ranks.size)
        return self._samples([trajectories[index * num_samples + n] for index in mine for n in range(num_samples)])

    def go_on(
        self,
        in_flight: PartialRolloutState,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: SamplingParams,
        key: str,
        version: int,
        num_wanted: int,
    ) -> list[Sample]:
        """Let the groups in flight go on, and new ones begin; return this rank's share of what may train.

        Args:
            in_flight: The groups; those that are not returned stay.
            prompts: Of new groups.
            num_wanted: Complete groups to return at most, of all ranks.
        """
        ranks = self._ranks
        in_flight.add(prompts, num_samples, key, ranks.num_engines)
        groups = in_flight.of_engine(ranks.engine, ranks.num_engines)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        self._play(trajectories, sampling, version, in_flight.options)
        released = in_flight.release(groups, ranks.is_first, num_wanted, self._gather)
        mine = rank_share(released, ranks.index, ranks.size)
        return self._samples([trajectory for group in mine for trajectory in group.trajectories])

    def pop_metrics(self) -> dict[str, float]:
        """Return what environments did since the last call."""
        return {} if self._environments is None else self._environments.pop_metrics()

    def close(self) -> None:
        """Close environments and engine; safe to call twice."""
        if self._environments is not None:
            self._environments.close()
        self._driver.close()

    def _play(
        self,
        trajectories: Sequence[Trajectory],
        sampling: SamplingParams,
        version: int,
        partial: PartialRollout | None = None,
    ) -> None:
        loop = AgentLoop(
            trajectories, sampling, self._options, self._environments, self._observations, partial, self._ranks
        )
        self._driver.play(loop, version)

    def _samples(self, trajectories: Sequence[Trajectory]) -> list[Sample]:
        return to_samples(trajectories, self._tokenizer, has_environment=self._environments is not None)
