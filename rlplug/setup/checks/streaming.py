"""Checks of what needs all prompts, or all groups of a step, in runs that read or train on them one by one."""

from __future__ import annotations

from collections.abc import Sequence

from rlplug.config import RunConfig
from rlplug.errors import ConfigError
from rlplug.interfaces.algorithm import Algorithm
from rlplug.training.batch_plan import BatchPlan


def check_streamed_prompts(config: RunConfig, is_streamed: bool) -> None:
    """Refuse what needs to know all training prompts, when they are read while training.

    Raises:
        ConfigError: The message names the key and the fix.
    """
    if is_streamed and config.num_steps is None:
        raise ConfigError("data.train streams, and nobody has counted its prompts: set model.num_steps.")
    if is_streamed and config.partial_rollout is not None:
        raise ConfigError(
            "model.partial_rollout finds the prompts of groups in flight by their uid, and data.train streams, which "
            "keeps no prompts: set streaming to false, or remove model.partial_rollout."
        )


def check_streaming(algorithm: Algorithm, plan: BatchPlan, editors: Sequence[str]) -> None:
    """Refuse to train on a step's groups as they complete where the step's update needs all of them.

    Args:
        algorithm: Algorithm of the run.
        plan: Sizes of the run.
        editors: Plugins that edit the batch of a step before its update.

    Raises:
        ConfigError: The message names what needs them and the fix.
    """
    name, key = type(algorithm).__name__, "model.partial_rollout.max_staleness is 0, which trains on groups one by one"
    instead = "or set max_staleness to 1 or more, or remove model.partial_rollout"
    if algorithm.needs.critic:
        raise ConfigError(f"{key}, and {name} trains a critic on the whole step. Take an algorithm without, {instead}.")
    if algorithm.streamed_divisor is None:
        raise ConfigError(
            f"{key}, and {name} does not say that its advantages need no other group (streamed_divisor): statistics "
            f"over the whole step, such as whitening, wait for the last one. Take another algorithm, {instead}."
        )
    for option, value in (("num_epochs", plan.num_epochs), ("mini_batch_size", plan.num_mini_batches)):
        if value > 1:
            raise ConfigError(
                f"{key}, with a single optimizer step at the end, and model.batch.{option} asks for "
                f"{plan.updates_per_step} a rollout: remove it, {instead}."
            )
    if editors:
        raise ConfigError(
            f"{key}, and {', '.join(editors)} may edit the batch of a whole step (hook prepare_batch). Block it with "
            f"--block {editors[0]}, {instead}."
        )
