"""The vocabulary of rlplug: frozen records that pass between the phases of a step.

Shape legend, used in every docstring:
    B  sequences (completions) in a batch
    N  their tokens, prompts included, end to end
    K  those of them that train
    V  vocabulary

Entry k of a tensor [K] speaks of token k: ``logprobs[k]`` is its logprob given all tokens before it in its sequence.
"""

from rlplug.types.batch import Batch
from rlplug.types.completions import (
    ENVIRONMENT,
    GIB,
    NO_VERSION,
    NOT_RECORDED,
    TRAJECTORY,
    Completion,
    FinishReason,
    Prompt,
    Request,
    SamplingParams,
)
from rlplug.types.mesh import MeshSizes
from rlplug.types.ranges import reaches
from rlplug.types.samples import RewardError, Rollout, Sample, Segment, groups_of
from rlplug.types.step_batch import StepBatch
from rlplug.types.step_statistics import ONE_RANK, Moments, StepStatistics

__all__ = ["ENVIRONMENT", "GIB", "NOT_RECORDED", "NO_VERSION", "ONE_RANK", "TRAJECTORY", "Batch", "Completion"]
__all__ += ["FinishReason", "MeshSizes", "Moments", "Prompt", "Request", "RewardError", "Rollout", "Sample"]
__all__ += ["SamplingParams", "Segment", "StepBatch", "StepStatistics", "groups_of", "reaches"]
