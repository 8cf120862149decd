"""Built-in plugin: the core's own classes and hooks, registered as any plugin's. Its hooks are called last.

It is imported before torch, as every plugin is, so that a name is checked in less than a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rlplug.interfaces import Algorithm, Bucket, Denominators, LossOutput, RolloutEngine, SyncReport
    from rlplug.registry import Registry
    from rlplug.types import Batch, StepBatch

hookimpl = pluggy.HookimplMarker("rlplug")


@hookimpl
def rlplug_register_rollouts(registry: Registry) -> None:
    registry.add("rollouts", "rlplug.rollout.hf_engine:HFRollout")


@hookimpl
def rlplug_register_trainers(registry: Registry) -> None:
    registry.add("trainers", "rlplug.models.transformers_trainer:TransformersTrainer")


@hookimpl
def rlplug_register_rewards(registry: Registry) -> None:
    registry.add("rewards", "rlplug.rewards.function:FunctionReward")


@hookimpl
def rlplug_sync_weights(engine: RolloutEngine, buckets: Iterable[Bucket], version: int) -> SyncReport:
    return engine.update_weights(buckets, version)


@hookimpl
def rlplug_prepare_batch(batch: StepBatch) -> StepBatch:
    return batch


@hookimpl
def rlplug_compute_loss(
    algorithm: Algorithm, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators
) -> LossOutput:
    from rlplug.interfaces.checks.algorithms import check_loss
    from rlplug.interfaces.checks.calls import PluginCall
    from rlplug.interfaces.checks.process_state import watched

    call = PluginCall(algorithm, "loss")
    with watched(call):
        return check_loss(call, algorithm.loss(micro_batch, logprobs, entropy, denominators))


@hookimpl
def rlplug_make_tokenizer(path: str) -> PreTrainedTokenizerBase:
    from rlplug.models.config import auto_tokenizer

    return auto_tokenizer(path)
