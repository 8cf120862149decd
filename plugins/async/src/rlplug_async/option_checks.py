"""Checks that options of a partial rollout do not contradict each other, the engine, the algorithm or the update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rlplug.errors import ConfigError
from rlplug.interfaces.algorithm import Algorithm
from rlplug.interfaces.rollout import RolloutEngine, require_capability
from rlplug.rollout.config import PartialRollout


def check_options(options: PartialRollout) -> None:
    """Refuse options that contradict each other.

    Raises:
        ConfigError: The message names the keys and the fix.
    """
    bound = options.bound
    if bound is None:
        _check_limits(options)
        return
    for name in ("max_tokens_per_step", "max_seconds_per_step", "groups_in_flight"):
        if getattr(options, name) is not None:
            first = "asynchronous" if options.asynchronous else "over_provisioning"
            raise ConfigError(
                f"model.partial_rollout has {first} and {name}: with the first a step ends when enough "
                "groups are complete. Remove one of them."
            )
    if options.streams and options.replay is not None:
        raise ConfigError(
            "model.partial_rollout.max_staleness is 0, so each step trains on its own groups: replay has nothing "
            "to repeat: remove it."
        )
    if options.streams and options.over_provisioning is not None:
        raise ConfigError(
            "model.partial_rollout.max_staleness is 0, and over_provisioning has groups train in a later "
            "step: remove over_provisioning, or set max_staleness to 1 or more."
        )
    if options.over_provisioning is not None and options.over_provisioning > bound + 1:
        raise ConfigError(
            f"model.partial_rollout.over_provisioning is {options.over_provisioning}: give a number above 1, and at "
            f"most {bound + 1}, which is max_staleness and 1. More groups could not train in time."
        )


def _check_limits(options: PartialRollout) -> None:
    if options.max_tokens_per_step is None and options.max_seconds_per_step is None:
        raise ConfigError(
            "model.partial_rollout has no limit: set asynchronous, over_provisioning, max_tokens_per_step or "
            "max_seconds_per_step, or remove it."
        )
    for name in ("max_staleness", "replay"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"model.partial_rollout.{name} is for asynchronous and over_provisioning: set one of them, or "
                "remove it."
            )


def check_partial_rollout(
    options: PartialRollout,
    max_new_tokens: int,
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
    if tokens is not None and tokens >= max_new_tokens:
        raise ConfigError(
            f"model.partial_rollout.max_tokens_per_step is {tokens}, and no trajectory gets more than "
            f"model.sampling.max_new_tokens {max_new_tokens}: give less, or remove it."
        )


def check_streaming(algorithm: Algorithm, updates: tuple[int, int], editors: Sequence[str]) -> None:
    """Refuse to train on a step's groups as they complete where the step's update needs all of them.

    Args:
        algorithm: Algorithm of the run.
        updates: Epochs of a step, and mini-batches of an epoch.
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
    for option, value in zip(("num_epochs", "mini_batch_size"), updates, strict=True):
        if value > 1:
            raise ConfigError(
                f"{key}, with a single optimizer step at the end, and model.batch.{option} asks for "
                f"{math.prod(updates)} a rollout: remove it, {instead}."
            )
    if editors:
        raise ConfigError(
            f"{key}, and {', '.join(editors)} may edit the batch of a whole step (hook prepare_batch). Block it with "
            f"--block {editors[0]}, {instead}."
        )
