"""The vocabulary of rlplug: frozen records that pass between the phases of a step.

Shape legend, used in every docstring:
    B  sequences (completions) in a batch
    T  tokens of the longest sequence in that batch, prompt included
    K  positions for which logits are computed
    V  vocabulary

Per-token tensors are aligned with ``input_ids``: entry ``[b, t]`` speaks of token ``t``, so ``logprobs[b, t]`` is
``log p(input_ids[b, t] | input_ids[b, :t])`` and ``logprobs[:, 0]`` is 0.
"""

from rlplug.types.batch import Batch
from rlplug.types.completions import (
    ENVIRONMENT,
    GIB,
    NO_VERSION,
    TRAJECTORY,
    Completion,
    FinishReason,
    Prompt,
    Request,
    SamplingParams,
)
from rlplug.types.mesh import MeshSizes
from rlplug.types.samples import RewardError, Rollout, Sample, Segment, groups_of
from rlplug.types.step_batch import StepBatch
from rlplug.types.step_statistics import ONE_RANK, Moments, StepStatistics

__all__ = [
    "ENVIRONMENT",
    "GIB",
    "NO_VERSION",
    "ONE_RANK",
    "TRAJECTORY",
    "Batch",
    "Completion",
    "FinishReason",
    "MeshSizes",
    "Moments",
    "Prompt",
    "Request",
    "RewardError",
    "Rollout",
    "Sample",
    "SamplingParams",
    "Segment",
    "StepBatch",
    "StepStatistics",
    "groups_of",
]
