"""Generates samples from prompts: makes trajectories, divides them among engines, and returns complete ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Store
from transformers import PreTrainedTokenizerBase

from rlplug.distributed.mesh import rank_share
from rlplug.observability.phase_progress import PHASE_PROGRESS, PhaseProgress
from rlplug.observability.timeline import EngineTimeline
from rlplug.rollout.agent_loop import AgentLoop
from rlplug.rollout.ranks import EngineRanks
from rlplug.rollout.trajectory import Trajectory, new_trajectories, to_samples

if TYPE_CHECKING:
    from rlplug.interfaces.environment import Environment
    from rlplug.interfaces.rollout import Placement, PolicySpec
    from rlplug.rollout.config import PartialRollout, TurnOptions
    from rlplug.rollout.engine_driver import EngineDriver
    from rlplug.rollout.partial.asynchronous import AsynchronousRollout
    from rlplug.rollout.partial.background import HeldOutRollout
    from rlplug.rollout.partial.enough_groups import CompleteGroups, EnoughGroups
    from rlplug.rollout.partial.state import PartialRolloutState
    from rlplug.rollout.turns.environment_calls import EnvironmentCalls
    from rlplug.rollout.turns.observation_tokens import ObservationTokens
    from rlplug.types import Prompt, Sample, SamplingParams


@dataclass(frozen=True)
class RolloutRequest:
    """Prompts to sample from, the same on all ranks, and how."""

    prompts: Sequence[Prompt]
    num_samples: int
    """Samples per prompt."""
    sampling: SamplingParams
    key: str
    """Name of run and step, from which the seeds are derived."""
    policy_version: int
    """Version of the weights that the engine must have."""


class RolloutGenerator:
    """Generates this rank's share of the samples of a step, with one engine and the environments of its trajectories.

    Args:
        driver: The driver of this rank's engine.
        spec: What engines are told about the policy.
        placement: This rank and its device.
        tokenizer: Decodes turns and samples.
        make_environment: Makes a trajectory's environment; ``None`` for completions of a single turn.
        options: Limits of turns.
        observations: Turns an environment's observation into tokens.
        gather: Returns the concatenation of all ranks' lists; collective.
        store: Store of all ranks; ``None`` for one.
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
        store: Store | None = None,
    ) -> None:
        self._driver = driver
        self._tokenizer = tokenizer
        self._options = options
        self._observations = observations
        self._policy = spec
        self._gather = gather
        self._make_environments: Callable[[], EnvironmentCalls] | None = None
        if make_environment is not None:
            from rlplug.rollout.turns.environment_calls import EnvironmentCalls

            arguments = (make_environment, tokenizer, spec.eos_token_ids, options, observations)
            self._make_environments = functools.partial(EnvironmentCalls, *arguments)
        self._environments = None if self._make_environments is None else self._make_environments()
        self._kept_environments: EnvironmentCalls | None = None
        """Those of a partial rollout, whose steps may go on while the others are used."""
        self._ranks = EngineRanks(placement, driver.engine.ranks_per_engine, communicates=make_environment is not None)
        self._store = store
        self._has_asynchronous = False

    @functools.cached_property
    def _complete(self) -> CompleteGroups:
        from rlplug.rollout.partial.enough_groups import CompleteGroups

        return CompleteGroups(self._store, self._ranks.engine, self._ranks.num_engines)

    @functools.cached_property
    def _asynchronous(self) -> AsynchronousRollout:
        """What generates while the policy trains, made at its first use."""
        from rlplug.rollout.partial.asynchronous import AsynchronousRollout

        self._has_asynchronous = True
        return AsynchronousRollout(self._driver, self._ranks, self._complete, self._gather)

    def generate(self, request: RolloutRequest, first_group: int = 0) -> list[Sample]:
        """Return the samples of this rank's share of the prompts. Collective.

        Args:
            request: Prompts, and how they are sampled.
            first_group: Group number of the first prompt; later prompts count on from it.
        """
        self.pause()
        trajectories = self._share_of_engine(request, first_group)
        self._loop(trajectories, request, self._environments).run(self._driver, request.policy_version)
        return self._samples(self._share_of_rank(trajectories, request.num_samples))

    def begin_held_out(self, request: RolloutRequest) -> None:
        """Let the next :meth:`resume` of an asynchronous rollout generate these prompts too, beside its groups.

        Args:
            request: Prompts, and how they are sampled; its version is that of the next :meth:`resume`.
        """
        from rlplug.rollout.partial.background import HeldOutRollout

        self._asynchronous.held_out = HeldOutRollout(
            trajectories=self._share_of_engine(request, first_group=0),
            sampling=request.sampling,
            version=request.policy_version,
            num_groups=len(request.prompts),
        )

    @property
    def has_held_out(self) -> bool:
        """Whether prompts of :meth:`begin_held_out` are generated."""
        return self._has_asynchronous and self._asynchronous.held_out is not None

    def finish_held_out(self, num_samples: int) -> list[Sample] | None:
        """Wait for the prompts of :meth:`begin_held_out`, and return this rank's share of their samples. Collective.

        Args:
            num_samples: Samples per prompt.

        Returns:
            ``None`` where an engine failed, and the weights with which the rest would be generated are gone.

        Raises:
            RunError: The engine failed and cannot restart, or hangs in a call.
            StopRequested: The run is told to stop.
        """
        held_out = self._asynchronous.held_out
        assert held_out is not None, "there is a validation"
        if self._asynchronous.finish_held_out() is None:
            if self._kept_environments is not None:
                self._kept_environments.forget(held_out.trajectories)
            return None
        return self._samples(self._share_of_rank(held_out.trajectories, num_samples))

    def resume(self, state: PartialRolloutState, request: RolloutRequest, num_wanted: int) -> list[Sample]:
        """Resume the groups of a partial rollout, start new ones, and return this rank's share of complete ones.

        Collective.

        Args:
            state: The unfinished groups; new ones join them, and those that are returned leave.
            request: Prompts of new groups, and how all groups are sampled.
            num_wanted: Most complete groups to return, over all ranks.
        """
        ranks, version = self._ranks, request.policy_version
        state.start(request.prompts, request.num_samples, request.key, version, ranks)
        if self._kept_environments is None and self._make_environments is not None:
            self._kept_environments = self._make_environments()
        released: list[list[Trajectory]] | None
        if state.options.asynchronous:
            released = self._asynchronous.take(
                state,
                lambda is_paused: self._loop(
                    state.all_trajectories,
                    request,
                    self._kept_environments,
                    state.options,
                    is_paused,
                    self._asynchronous.held_out,
                    self._asynchronous.timeline,
                    PhaseProgress(),
                ),
                num_wanted,
                version,
                has_new_groups=bool(request.prompts),
            )
        else:
            state.note_resumed()
            is_enough = self._enough(state, request, num_wanted)
            loop = self._loop(state.all_trajectories, request, self._kept_environments, state.options, is_enough)
            loop.run(self._driver, version)
            released = state.release(num_wanted, version, ranks, self._gather)
            assert released is not None, "the loop ends with enough groups, or with all of them complete"
        mine = rank_share(released, ranks.index, ranks.size)
        return self._samples([trajectory for group in mine for trajectory in group])

    def pause(self) -> None:
        """Break off what is generated in the background; its tokens so far are in the trajectories then."""
        if self._has_asynchronous:
            self._asynchronous.pause()

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of engine, environments and an asynchronous rollout since the last call.

        In a run with a partial rollout they are of its environments.
        """
        of_environments: dict[str, float] = {}
        for environments in (self._environments, self._kept_environments):
            if environments is not None:
                of_environments = environments.pop_metrics()
        of_background = self._asynchronous.pop_metrics() if self._has_asynchronous else {}
        return self._driver.pop_metrics() | of_background | of_environments

    def pop_timeline(self) -> dict[str, list[Any]]:
        """Return what the engine of an asynchronous rollout did since the last call."""
        return self._asynchronous.timeline.pop() if self._has_asynchronous else EngineTimeline().pop()

    def close(self) -> None:
        """Close environments and engine; safe to call twice."""
        if self._has_asynchronous:
            self._asynchronous.close()
        for environments in (self._environments, self._kept_environments):
            if environments is not None:
                environments.close()
        self._driver.close()

    def _share_of_engine(self, request: RolloutRequest, first_group: int) -> list[Trajectory]:
        """Return new trajectories of the prompts that this rank's engine generates."""
        ranks = self._ranks
        numbered = rank_share(list(enumerate(request.prompts, start=first_group)), ranks.engine, ranks.num_engines)
        prompts, groups = [prompt for _, prompt in numbered], [group for group, _ in numbered]
        return new_trajectories(prompts, groups, request.num_samples, request.key)

    def _share_of_rank(self, trajectories: Sequence[Trajectory], num_samples: int) -> list[Trajectory]:
        """Return this rank's share of what its engine returned: ranks of one engine divide it, whole groups each."""
        mine = rank_share(range(len(trajectories) // num_samples), self._ranks.index, self._ranks.size)
        return [trajectories[index * num_samples + sample] for index in mine for sample in range(num_samples)]

    def _enough(self, state: PartialRolloutState, request: RolloutRequest, num_wanted: int) -> EnoughGroups | None:
        """Return what tells the agent loop that the step's groups are complete, where it ends with them."""
        if state.options.bound is None:
            return None
        from rlplug.rollout.partial.enough_groups import EnoughGroups

        return EnoughGroups(
            own=state.complete,
            suffice=lambda complete: state.is_enough(complete, num_wanted, request.policy_version),
            board=self._complete,
            wait_key=request.key,
        )

    def _loop(
        self,
        trajectories: Sequence[Trajectory],
        request: RolloutRequest,
        environments: EnvironmentCalls | None,
        partial: PartialRollout | None = None,
        is_enough: Callable[[], bool] | None = None,
        held_out: HeldOutRollout | None = None,
        timeline: EngineTimeline | None = None,
        progress: PhaseProgress = PHASE_PROGRESS,
    ) -> AgentLoop:
        return AgentLoop(
            trajectories=trajectories,
            sampling=request.sampling,
            options=self._options,
            environments=environments,
            observations=self._observations,
            partial=partial,
            is_enough=is_enough,
            held_out=held_out,
            timeline=timeline,
            ranks=self._ranks,
            policy=self._policy,
            version=request.policy_version,
            progress=progress,
        )

    def _samples(self, trajectories: Sequence[Trajectory]) -> list[Sample]:
        return to_samples(trajectories, self._tokenizer, has_environment=self._environments is not None)
