"""Checks that options of a partial rollout do not contradict each other."""

from __future__ import annotations

from rlplug.errors import ConfigError
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
