"""Models of a run that an optimization changes: all that it can, or those that its option ``networks`` names."""

from __future__ import annotations

from collections.abc import Sequence

from rlplug.errors import ConfigError
from rlplug.interfaces import Network, Optimization


def chosen_networks(optimization: Optimization, networks: Sequence[Network] | None) -> tuple[Network, ...]:
    """Return the models to change, in the order of the class's ``applies_to``.

    Raises:
        ConfigError: None is named, or one that the optimization cannot change.
    """
    all_of_them = type(optimization).applies_to
    if networks is None:
        return all_of_them
    if not networks or not set(networks) <= set(all_of_them):
        raise ConfigError(
            f"{type(optimization).__name__}.networks is {list(networks)}: give one or more of "
            f"{', '.join(all_of_them)}, or leave it out for all."
        )
    return tuple(network for network in all_of_them if network in networks)
