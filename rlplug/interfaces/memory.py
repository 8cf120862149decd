"""What decides on a run's memory: of the update, as optimizations change it, and of a rollout engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ActivationTraits:
    """What of an update decides on its memory; optimizations change it (:meth:`Optimization.plan_memory`)."""

    fused_pointwise: bool = False
    """Norms, activations and rotary embeddings are fused kernels, which keep fewer tensors for the backward pass."""
    recompute: Literal["nothing", "all_but_products", "all"] = "nothing"
    """What of a block is computed again in the backward pass; ``products`` are those of matrices, and attention."""
    recompute_every: int = 1
    """With ``all``: every n-th block is recomputed, and the others keep what they would."""
    activations_on_host: bool = False
    """What blocks keep waits in host memory, that of about two blocks excepted."""
    logits_chunk: int | None = None
    """Tokens whose logits exist at a time; ``None`` for all that a pass scores."""


@dataclass(frozen=True)
class EngineMemoryRequest:
    """What an engine's memory follows from, for :meth:`RolloutEngine.plan_memory`."""

    device_bytes: int
    """Memory of one GPU."""
    parameters: int
    kv_bytes_per_token: int
    """Keys and values of a token in all layers, in the policy's dtype."""
    completions: int
    """Of one rank, in a step."""
    longest: int
    """Tokens of the longest possible prompt and completion."""
    vocab_size: int
    fp8_parameters: int = 0
    """Those of ``parameters`` that travel in FP8."""

    def weight_bytes(self, itemsize: int) -> int:
        """Return the size of the weights in an engine that takes them as they travel, without their scales.

        Args:
            itemsize: Of those that do not travel in FP8.
        """
        return self.fp8_parameters + (self.parameters - self.fp8_parameters) * itemsize


@dataclass(frozen=True)
class EngineMemory:
    """What an engine takes of one of the trainer's GPUs, in bytes."""

    weights: int
    kv_cache: int
    other: int
    """Activations of its passes, CUDA graphs."""
    asleep: int
    """What stays when it sleeps; all that it keeps between rollouts where it cannot."""
    kv_bytes_per_token: int
    """On one GPU."""
    least_kv_cache: int | None = None
    """The smallest cache that it starts with, where ``share_key`` sets the size; ``None`` elsewhere."""
    share_key: str = "gpu_memory_utilization"
    """The engine's option for its share of the GPU."""
    share_has_passes: bool = True
    """Whether ``other`` is in that share, beside weights and cache."""
    keeps_cache: bool = True
    """Whether the cache stays between rollouts while the engine is awake."""

    @property
    def share_base(self) -> int:
        """What is in the engine's share of the GPU beside the cache."""
        return self.weights + self.other * self.share_has_passes

    @property
    def awake(self) -> int:
        """What it takes while it generates."""
        return self.weights + self.kv_cache + self.other

    @property
    def idle(self) -> int:
        """What it takes between rollouts when it does not sleep."""
        return self.awake if self.keeps_cache else self.weights

    @property
    def can_sleep(self) -> bool:
        return self.asleep < self.idle
