"""Checks of a rollout that goes on from step to step, or whose groups train as they complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlplug.errors import ConfigError
from rlplug.interfaces.algorithm import Algorithm
from rlplug.interfaces.rollout import RolloutEngine, require_capability
from rlplug.rollout.config import PartialRollout
from rlplug.training.batch_plan import BatchPlan
from rlplug.types import SamplingParams


def check_partial_rollout(
    options: PartialRollout,
    sampling: SamplingParams,
    algorithm: Algorithm,
    engine: RolloutEngine,
    engines: Iterable[type],
) -> None:
    """Refuse a partial rollout that nothing would correct for, or that the engine cannot interrupt.

    Raises:
        ConfigError: The message names the key and the fix.
    """
    if not (options.streams or algorithm.needs.rollout_logprobs):
        raise ConfigError(
            f"model.partial_rollout trains on tokens of former policies, and {type(algorithm).__name__} does not "
            "correct for that: set its init_args.correction, or remove model.partial_rollout."
        )
    for option in ("asynchronous", "over_provisioning", "max_seconds_per_step", "trajectory_deadline_s"):
        if getattr(options, option):
            require_capability(engine, "streaming", f"model.partial_rollout.{option}", engines)
    if options.asynchronous:
        require_capability(engine, "disaggregated", "model.partial_rollout.asynchronous", engines)
    tokens = options.max_tokens_per_step
    if tokens is not None and tokens >= sampling.max_new_tokens:
        raise ConfigError(
            f"model.partial_rollout.max_tokens_per_step is {tokens}, and no trajectory gets more than "
            f"model.sampling.max_new_tokens {sampling.max_new_tokens}: give less, or remove it."
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
