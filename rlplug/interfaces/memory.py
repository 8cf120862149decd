"""Inputs of the memory plan: properties of the training step, and the memory of a rollout engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

PlanPhase: TypeAlias = Literal["sync", "rollout", "logprobs", "update"]
PLAN_PHASES: Final[tuple[PlanPhase, ...]] = ("sync", "rollout", "logprobs", "update")
"""Phases of the memory plan, in the order of its columns."""
Recompute: TypeAlias = Literal["nothing", "all_but_products", "all_but_half_of_products", "all_but_attention", "all"]


@dataclass(frozen=True)
class ActivationTraits:
    """Properties of the training step that determine its activation memory.

    Trainers, then optimizations change them with :meth:`ModelTrainer.plan_memory`, :meth:`Optimization.plan_memory`.

    Attributes:
        fused_pointwise: Whether norms, activations and rotary embeddings are fused kernels, which save fewer tensors
            for the backward.
        fused_norms: Whether norms alone are such kernels, as ``torch.nn.RMSNorm`` is.
        recompute: Part of a block that the backward pass recomputes: nothing, all but matrix products and attention,
            all but every second product and attention, all but attention, or all.
        recompute_every: Number n when ``recompute`` is ``all``: every n-th block is recomputed, and the others keep
            their activations.
        activations_on_host: Whether the saved activations of blocks are in host memory, except for those of about two
            blocks.
        logits_chunk: Number of tokens whose logits exist at a time; ``None`` for all tokens of a forward pass.
        keeps_logits: Whether an update keeps the logits of all chunks for its backward pass, in the pass's dtype.
        sequence_parallel: Whether ranks of the tensor axis also split embeddings, output layer, and tokens elsewhere.
    """

    fused_pointwise: bool = False
    fused_norms: bool = False
    recompute: Recompute = "nothing"
    recompute_every: int = 1
    activations_on_host: bool = False
    logits_chunk: int | None = None
    keeps_logits: bool = False
    sequence_parallel: bool = False


@dataclass(frozen=True)
class EngineMemoryRequest:
    """Inputs from which :meth:`RolloutEngine.plan_memory` computes an engine's memory.

    Attributes:
        device_bytes: Memory of one GPU, in bytes.
        parameters: Number of the policy's parameters.
        kv_bytes_per_token: Bytes of a token's keys and values in all layers, in the policy's dtype.
        completions: Number of completions of one rank in a step.
        longest: Length of the longest possible prompt and completion together, in tokens.
        fp8_parameters: Number of ``parameters`` that are sent in FP8.
    """

    device_bytes: int
    parameters: int
    kv_bytes_per_token: int
    completions: int
    longest: int
    vocab_size: int
    fp8_parameters: int = 0

    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of the weights in an engine that keeps the dtypes of the sync, without FP8 scales.

        Args:
            itemsize: Bytes of a parameter that is not sent in FP8.
        """
        return self.fp8_parameters + (self.parameters - self.fp8_parameters) * itemsize


@dataclass(frozen=True)
class EngineMemory:
    """Memory that an engine takes on one of its GPUs, in bytes.

    Attributes:
        other: Activations of its forward passes, and CUDA graphs.
        asleep: Memory that it keeps while it sleeps; if it cannot sleep, all that it keeps between rollouts.
        kv_bytes_per_token: Bytes of a token's keys and values on one GPU.
        least_kv_cache: Smallest cache with which it starts, where ``share_key`` sets the size; ``None`` elsewhere.
        share_key: Name of the engine's option for its fraction of the GPU's memory.
        share_has_passes: Whether that fraction includes ``other``, besides weights and cache.
        rows: Completions that it generates at once, where ``rows_key`` sets their number; ``kv_cache`` and ``other``
            grow with it. 0 elsewhere.
        rows_key: Name of the engine's option for the most completions at once.
        keeps_cache: Whether the cache stays between rollouts while the engine is awake.
        own_gpus: GPUs that it has, all copies of the model together, besides the trainer's; 0 on the trainer's.
    """

    weights: int
    kv_cache: int
    other: int
    asleep: int
    kv_bytes_per_token: int
    least_kv_cache: int | None = None
    share_key: str = "gpu_memory_utilization"
    share_has_passes: bool = True
    rows: int = 0
    rows_key: str = "max_batch_size"
    keeps_cache: bool = True
    own_gpus: int = 0

    @property
    def share_base(self) -> int:
        """Memory in the engine's fraction of the GPU besides the cache."""
        return self.weights + self.other * self.share_has_passes

    @property
    def awake(self) -> int:
        """Memory that it takes while it generates."""
        return self.weights + self.kv_cache + self.other

    @property
    def idle(self) -> int:
        """Memory that it takes between rollouts when it does not sleep."""
        return self.awake if self.keeps_cache else self.weights

    @property
    def can_sleep(self) -> bool:
        return self.asleep < self.idle
