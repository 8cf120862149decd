"""Inputs of the memory plan, as plain numbers: remedies change them and plan again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rlplug.distributed.offload import OffloadMode
from rlplug.interfaces.memory import ActivationTraits, EngineMemory, PlanPhase
from rlplug.interfaces.memory_plan import GPU
from rlplug.training.batch_plan import PassKind
from rlplug.types import GIB
from rlplug_plan.model_shape import ModelShape

NCCL_BYTES: Final = int(0.5 * GIB)


@dataclass(frozen=True)
class ModelInputs:
    """A network of the run, as one rank of the tensor axis has it."""

    shape: ModelShape
    traits: ActivationTraits = ActivationTraits()
    state_bytes: float = 0.0
    """Bytes of optimizer state per parameter that trains; 0 for a network that does not learn."""
    adapters: int | None = None
    """Parameters of low-rank adapters, which alone train; ``None`` where all parameters do."""

    @property
    def trained(self) -> int:
        """Parameters that train."""
        return self.shape.parameters if self.adapters is None else self.adapters


@dataclass(frozen=True)
class Sizes:
    """The batch, as a rank of the data axes sees it."""

    update_rows: int
    """Completions of a mini-batch."""
    forward_rows: int
    """Completions of a step."""
    longest: int
    """Tokens of the longest possible prompt and completion."""
    max_new_tokens: int
    max_tokens: dict[PassKind, int]
    """Token budget of a rank's pass; empty when ``micro_batch_size`` decides."""
    micro_batch_size: int | None = None
    sequence_size: int = 1

    def tokens(self, phase: PassKind) -> int:
        """Return the most tokens of a rank in one pass; rows of mixed lengths can fill a budget to its last token."""
        rows = self._rows(phase)
        if self.micro_batch_size is not None:
            num_passes = -(-rows // self.micro_batch_size)
            return -(-rows // num_passes) * self.longest // self.sequence_size
        budget = max(self.max_tokens[phase] * self.sequence_size, self.longest)
        return min(rows * self.longest, budget) // self.sequence_size

    def needs_several_passes(self, phase: PassKind) -> bool:
        """Return whether one pass cannot hold all rows when they are as long as possible."""
        return self._rows(phase) * self.longest > self.tokens(phase) * self.sequence_size

    def scored(self, phase: PassKind) -> int:
        """Return those of them whose logprobs are wanted."""
        return self.tokens(phase) * self.max_new_tokens // self.longest

    def _rows(self, phase: PassKind) -> int:
        return self.update_rows if phase == "update" else self.forward_rows


@dataclass(frozen=True)
class MemoryInputs:
    """All numbers that determine the memory of one GPU."""

    gpu: GPU
    policy: ModelInputs
    sizes: Sizes
    reference: ModelInputs | None = None
    critic: ModelInputs | None = None
    """A critic with a trunk of its own; a head on the policy's trunk takes almost nothing."""
    num_gpus: int = 1
    shards: int = 1
    """Ranks that a network's weights are split over, besides those of the tensor axis."""
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
    logprobs_every_step: bool = True
    """Whether the policy runs before each update, or in the first step alone."""
    rewards_kept: int = 0
    """Bytes that rewards keep on the GPU in all phases."""
    rewards_brought: int = 0
    """Bytes that rewards bring there between rollout and update."""
    assumes_state: bool = False
    """Whether the size of the optimizer's state could not be determined."""
    scales: Mapping[PlanPhase, float] = field(default_factory=dict)
    """Factors by which phases need more than is planned, as a run that ran out of memory has measured."""
