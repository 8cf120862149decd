"""Where samples come from: what generates those of prompts, and the source of the groups on which steps train."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Store
from transformers import PreTrainedTokenizerBase

from rlplug.distributed.mesh import rank_share
from rlplug.errors import ConfigError
from rlplug.rollout.agent_loop import WHOLE_STEP, AgentLoop, GenerationStep
from rlplug.rollout.ranks import EngineRanks
from rlplug.rollout.trajectory import Trajectory, new_trajectories, to_samples

if TYPE_CHECKING:
    from rlplug.interfaces import Algorithm, RolloutEngine
    from rlplug.rollout.config import TurnOptions
    from rlplug.rollout.engine_driver import EngineDriver
    from rlplug.rollout.turns.trajectory_turns import TurnRules
    from rlplug.types import Prompt, Sample, SamplingParams, StepBatch


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
    """Generates this rank's share of the samples of prompts, with one engine and environments of its trajectories.

    Args:
        driver: The driver of this rank's engine.
        tokenizer: Decodes samples.
        make_rules: Returns what follows a turn, with environments of its own.
        gather: Returns the concatenation of all ranks' lists; collective.
        store: Store of all ranks; ``None`` for one.
    """

    def __init__(
        self,
        driver: EngineDriver,
        tokenizer: PreTrainedTokenizerBase,
        make_rules: Callable[[], TurnRules],
        gather: Callable[[Any], Any] = list,
        store: Store | None = None,
    ) -> None:
        self.driver = driver
        self.make_rules = make_rules
        self.gather, self.store = gather, store
        self._tokenizer = tokenizer
        self._rules = make_rules()
        self.ranks = EngineRanks(
            driver.placement, driver.engine.ranks_per_engine, communicates=self._rules.environments is not None
        )

    def generate(self, request: RolloutRequest, first_group: int = 0) -> list[Sample]:
        """Return the samples of this rank's share of the prompts. Collective.

        Args:
            request: Prompts, and how they are sampled.
            first_group: Group number of the first prompt; later prompts count on from it.
        """
        groups = self.share_of_engine(request, first_group)
        self.loop([each for group in groups for each in group], request, self._rules).run(self.driver)
        return self.share_of_rank(groups)

    def loop(
        self,
        trajectories: Sequence[Trajectory],
        request: RolloutRequest,
        rules: TurnRules,
        step: GenerationStep = WHOLE_STEP,
    ) -> AgentLoop:
        """Return what generates ``trajectories`` as ``request`` says."""
        arguments = (trajectories, request.sampling, rules, self.driver.spec, request.policy_version, self.ranks)
        if rules.environments is None and step is WHOLE_STEP:
            return AgentLoop(*arguments)
        from rlplug.rollout.streaming import StreamingLoop

        return StreamingLoop(*arguments, step=step)

    def share_of_engine(self, request: RolloutRequest, first_group: int = 0) -> list[list[Trajectory]]:
        """Return new trajectories of the prompts that this rank's engine generates, in groups."""
        ranks = self.ranks
        numbered = rank_share(list(enumerate(request.prompts, start=first_group)), ranks.engine, ranks.num_engines)
        return [new_trajectories([prompt], [group], request.num_samples, request.key) for group, prompt in numbered]

    def share_of_rank(self, groups: Sequence[Sequence[Trajectory]]) -> list[Sample]:
        """Return this rank's share of what its engine completed: ranks of one engine divide it, whole groups each."""
        mine = [each for group in rank_share(groups, self.ranks.index, self.ranks.size) for each in group]
        return to_samples(mine, self._tokenizer, has_environment=self._rules.environments is not None)

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of engine and environments since the last call. Collective."""
        return self.driver.pop_metrics() | self._rules.pop_metrics()

    def close(self) -> None:
        """Close environments and engine; safe to call twice."""
        self._rules.close()
        self.driver.close()


class RolloutSource:
    """Source of the groups on which steps train: those of a step's own prompts, all of them generated in the step.

    Those of plugins, by the hook ``rlplug_make_source``, may keep groups between steps. A source is made before
    anything is loaded, so that a checkpoint finds it, and generates once :meth:`start` has given it a generator.
    """

    generator: RolloutGenerator
    make_step_training: Callable[..., Any] | None = None
    """Makes what trains on a step's groups, where they train as they complete; called as ``StepTraining`` is."""

    def start(self, generator: RolloutGenerator) -> None:
        """Generate with ``generator`` from now on."""
        self.generator = generator

    # ---- a step ---------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Begin a step, to whose beginning :meth:`rollback` goes back."""

    def rollback(self) -> None:
        """Discard the step that has begun."""

    @property
    def awaits_groups(self) -> bool:
        """Whether the step trains on groups that are still generated, besides those it has."""
        return False

    def num_prompts_wanted(self, num_missing: int, over_sampling: float) -> int:
        """Return how many new prompts to start.

        Args:
            num_missing: Groups that the step lacks, over all ranks.
            over_sampling: Groups that the algorithm draws for each that it trains on.
        """
        return math.ceil(num_missing * over_sampling)

    def sync_weights(self, version: int) -> None:
        """Give the engine the weights of ``version``, unless it has them. Collective."""
        self.generator.driver.sync_weights(version)

    def next_groups(self, request: RolloutRequest, num_missing: int, num_drawn: int) -> list[Sample]:
        """Return this rank's share of the samples of the next groups. Collective.

        Args:
            request: Prompts of new groups, and how all groups are sampled.
            num_missing: Groups that the step lacks, over all ranks.
            num_drawn: Groups that the step has drawn before.

        Raises:
            RunError: An engine failed and cannot restart, or has used up its restarts.
            StopRequested: The run is told to stop.
        """
        return self.generator.generate(request, first_group=num_drawn)

    def metrics(self, batch: StepBatch, version: int) -> dict[str, float]:
        """Return metrics of the groups in a step's batch, where ``version`` of the policy trains on it. Collective."""
        return {}

    def groups_line(self, step: int, phases: list[tuple[str, float, float]]) -> str | None:
        """Return the line of ``groups.jsonl`` for a step that has ended; ``None`` where groups are of its own prompts.

        Args:
            step: Number of the step.
            phases: Name, beginning and end of each of its phases, in seconds of ``time.monotonic``.
        """
        return None

    # ---- between steps --------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Break off what is generated in the background; safe to call twice."""

    def generate(self, request: RolloutRequest) -> list[Sample]:
        """Return this rank's share of the samples of prompts that do not train. Collective."""
        return self.generator.generate(request)

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of engine and environments since the last call. Collective."""
        return self.generator.pop_metrics()

    def close(self) -> None:
        """Close environments and engine; safe to call twice."""
        self.generator.close()

    # ---- a validation beside a step -------------------------------------------------------------------------------

    @property
    def has_held_out(self) -> bool:
        """Whether prompts of :meth:`begin_held_out` are generated."""
        return False

    def begin_held_out(self, request: RolloutRequest) -> None:
        """Let the engine generate these prompts beside the groups of the step that begins."""
        raise AssertionError("the configuration is checked before: only an asynchronous rollout can")

    def finish_held_out(self, num_samples: int) -> list[Sample] | None:
        """Wait for the prompts of :meth:`begin_held_out`, and return this rank's share of their samples. Collective.

        Returns:
            ``None`` where an engine failed, and the weights with which the rest would be generated are gone.

        Raises:
            RunError: The engine failed and cannot restart, or hangs in a call.
            StopRequested: The run is told to stop.
        """
        raise AssertionError("there is no validation that begin_held_out began")

    # ---- in a checkpoint, and in a run that repeats another --------------------------------------------------------

    def check(self, engine: RolloutEngine, algorithm: Algorithm, max_new_tokens: int, updates: tuple[int, int]) -> None:
        """Refuse what does not go with how this source gives groups; ``updates`` are epochs of a step and mini-batches.

        Raises:
            ConfigError: The message names the key and the fix.
        """

    def identify(self, seed: int, data: Mapping[str, Any], group_size: int, num_steps: int) -> None:
        """Learn whose groups these are, before anything is loaded.

        Args:
            seed: Seed of the run.
            data: What the stream of training prompts says of its prompts and their order.
            group_size: Samples of a group.
            num_steps: Steps of the run.

        Raises:
            ConfigError: ``replay`` does not fit; the message names the key.
        """

    def state_dict(self, gather: Callable[[Any], Any]) -> dict[str, Any] | None:
        """Return the groups that are under way as plain data, which later steps do not change. Collective."""
        return None

    def load_state_dict(
        self,
        state: Mapping[str, Any] | None,
        prompts: Mapping[str, Prompt],
        version: int,
        max_new_tokens: int,
        turns: TurnOptions,
    ) -> None:
        """Go on with the groups that a checkpoint has under way.

        Args:
            state: A :meth:`state_dict`, perhaps of another kind of source.
            prompts: The training prompts by ``uid``.
            version: Version of the checkpoint's policy.
            max_new_tokens: Most tokens of a trajectory after its prompt.
            turns: Limits of turns.

        Raises:
            ConfigError: There are some, and the run keeps none, has not their prompts, allows fewer tokens than they
                have, or cannot train them within its bound.
        """
        if state is not None and state["trajectories"]:
            raise ConfigError(
                f"The checkpoint has {len(state['trajectories'])} groups in flight, and model.partial_rollout is not "
                "set: set it as in the run that wrote the checkpoint."
            )
