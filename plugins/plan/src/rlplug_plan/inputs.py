"""Inputs of the memory plan, as plain numbers: remedies change them and plan again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from rlplug.distributed.offload import OffloadMode
from rlplug.interfaces.memory import ActivationTraits, EngineMemory, PlanPhase
from rlplug.interfaces.memory_plan import GPU
from rlplug.training.batch_plan import PassKind
from rlplug.types import GIB, MeshSizes
from rlplug_plan.model_shape import ModelShape

NCCL_BYTES: Final = int(0.5 * GIB)


def no_sizes(requests: int, prompt_tokens: int) -> Mapping[str, Any]:
    """Return the options of an engine that names none for its sizes."""
    return {}


@dataclass(frozen=True)
class ModelInputs:
    """A network of the run."""

    whole: ModelShape
    traits: ActivationTraits = ActivationTraits()
    state_bytes: float = 0.0
    """Bytes of optimizer state per parameter that trains; 0 for a network that does not learn."""
    adapters: int | None = None
    """Parameters of low-rank adapters, which alone train; ``None`` where all parameters do."""
    tensor: int = 1
    """Ranks that share each matrix of a block."""

    @cached_property
    def shape(self) -> ModelShape:
        """Its shape on one rank of the tensor axis."""
        return self.whole.split(self.tensor, self.traits.sequence_parallel)

    @property
    def trained(self) -> int:
        """Parameters that train."""
        return self.shape.parameters if self.adapters is None else self.adapters


@dataclass(frozen=True)
class Sizes:
    """The batch, and the ranks that share it."""

    update_rows: int
    """Completions of a mini-batch, over all ranks."""
    forward_rows: int
    """Completions of a step, over all ranks."""
    longest: int
    """Tokens of the longest possible prompt and completion."""
    max_new_tokens: int
    max_tokens: dict[PassKind, int]
    """Token budget of a rank's pass; empty when ``micro_batch_size`` decides."""
    update_is_set: bool = True
    """Whether the budget of updates is set, and does not follow from the longest sequence."""
    forward_is_set: bool = False
    """Whether the budget of forward-only passes is set, and does not follow from the update's."""
    micro_batch_size: int | None = None
    micro_batch_size_forward: int | None = None
    """The same where nothing is trained; ``None`` for as many as in updates."""
    critic_tokens: int | None = None
    """Token budget of a critic's update passes; ``None`` for the policy's."""
    critic_tokens_forward: int | None = None
    """The same where nothing is trained; ``None`` for twice ``critic_tokens``, or the policy's without it."""
    sequence_size: int = 1
    data_size: int = 1
    """Ranks, or groups of ranks, over which rows are divided."""

    @property
    def of_critic(self) -> Sizes:
        """The sizes of a critic's passes."""
        if not self.max_tokens:
            return self
        update, forward = self.max_tokens["update"], self.max_tokens["forward"]
        if self.critic_tokens is not None:
            update, forward = self.critic_tokens, 2 * self.critic_tokens
        return replace(self, max_tokens={"update": update, "forward": self.critic_tokens_forward or forward})

    def tokens(self, phase: PassKind) -> int:
        """Return the most tokens of a rank in one pass; rows of mixed lengths can fill a budget to its last token."""
        rows = self.rows(phase)
        if self.micro_batch_size is not None:
            num_passes = -(-rows // self.rows_per_pass(phase))
            return -(-rows // num_passes) * self.longest // self.sequence_size
        budget = max(self.max_tokens[phase] * self.sequence_size, self.longest)
        return min(rows * self.longest, budget) // self.sequence_size

    def rows_per_pass(self, phase: PassKind) -> int:
        """Return ``micro_batch_size``, or that of forward-only passes; it must be set."""
        assert self.micro_batch_size is not None
        return self.micro_batch_size if phase == "update" else self.micro_batch_size_forward or self.micro_batch_size

    def needs_several_passes(self, phase: PassKind) -> bool:
        """Return whether one pass cannot hold all rows when they are as long as possible."""
        return self.rows(phase) * self.longest > self.tokens(phase) * self.sequence_size

    def scored(self, phase: PassKind) -> int:
        """Return those of them whose logprobs are wanted."""
        return self.tokens(phase) * self.max_new_tokens // self.longest

    def rows(self, phase: PassKind) -> int:
        """Return the completions of a rank of the data axes, at most."""
        return -(-(self.update_rows if phase == "update" else self.forward_rows) // self.data_size)

    @property
    def least_budget(self) -> int:
        """The smallest token budget of a rank: its part of the longest sequence."""
        return -(-self.longest // self.sequence_size)


@dataclass(frozen=True)
class Possible:
    """What the parts of a run allow a change to do; by default nothing that depends on them."""

    heads: int = 0
    """Attention heads of the narrowest model; 0 where the mesh cannot change."""
    kv_heads: int = 0
    axes: frozenset[str] = frozenset()
    """Axes of the mesh besides ``shard`` that the trainer has."""
    prompts_per_step: int | None = None
    """What the number of GPUs must divide; ``None`` for no limit."""
    optimizations: frozenset[str] = frozenset({"FusedLogprobs", "GradientCheckpointing"})
    """Optimizations by class name that can be added."""
    offload: bool = True
    """Whether a plugin carries out ``model.memory.offload``."""
    lora: bool = False
    adamw_8bit: bool = False
    larger_engines: bool = False
    """Whether an engine may be shared by more GPUs."""


@dataclass(frozen=True)
class MemoryInputs:
    """All numbers that determine the memory of one GPU."""

    gpu: GPU
    policy: ModelInputs
    sizes: Sizes
    reference: ModelInputs | None = None
    critic: ModelInputs | None = None
    """A critic with a trunk of its own; a head on the policy's trunk takes almost nothing."""
    has_value_head: bool = False
    """Whether the critic is such a head."""
    mesh: MeshSizes = MeshSizes(1, 1, 1, 1)
    itemsize: int = 2
    """Bytes of a weight in passes and in the engine."""
    reshard_after_forward: bool = True
    sync_every_micro_batch: bool = False
    offload: OffloadMode = "none"
    engine: EngineMemory | None = None
    engine_can_sleep: bool = False
    sleeps: bool = False
    bucket_bytes: int = 1 << 30
    completions: int = 0
    """Completions of one engine in a step."""
    group_size: int = 1
    """Completions of a prompt."""
    size_options: Callable[[int, int], Mapping[str, Any]] = no_sizes
    """Returns the engine's options to change for as many requests at once, and tokens of prompts in a pass."""
    own_engine: MemoryInputs | None = None
    """The run as the GPUs of an engine that has its own see it; ``None`` for one on the trainer's."""
    engine_gpus: int = 1
    """GPUs that share one engine."""
    logprobs_every_step: bool = True
    """Whether the policy runs before each update, or in the first step alone."""
    rewards_kept: int = 0
    """Bytes that rewards keep on the GPU in all phases."""
    rewards_brought: int = 0
    """Bytes that rewards bring there between rollout and update."""
    assumes_state: bool = False
    """Whether the size of the optimizer's state could not be determined."""
    possible: Possible = Possible()
    scales: Mapping[PlanPhase, float] = field(default_factory=dict)
    """Factors by which phases need more than is planned, as a run that ran out of memory has measured."""

    @property
    def num_gpus(self) -> int:
        return self.mesh.world_size

    @property
    def shards(self) -> int:
        """Ranks that a network's weights are split over, besides those of the tensor axis."""
        return self.mesh.shard * self.mesh.sequence

    @property
    def wanted_kv_cache(self) -> int:
        """Bytes of a cache that holds all completions of an engine at once; 0 where its size is not an option."""
        if self.engine is None or self.engine.least_kv_cache is None:
            return 0
        return max(self.completions * self.sizes.longest * self.engine.kv_bytes_per_token, self.engine.least_kv_cache)
