"""Ends the generation of a step as soon as enough groups are complete, over all engines."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

from torch._C._distributed_c10d import Store

POLL_S: Final = 0.05
"""Longest time between two questions whether the groups are enough, in seconds."""


class CompleteGroups:
    """Numbers of the complete groups of all engines, which exchange them through the ranks' store while they generate.

    Args:
        store: Store of all ranks; ``None`` for one engine.
        engine: Number of this rank's engine.
        num_engines: Engines of the run.
    """

    def __init__(self, store: Store | None, engine: int, num_engines: int) -> None:
        self._store = store if num_engines > 1 else None
        self._keys = [f"complete_groups/{number}" for number in range(num_engines)]
        self._own_key = self._keys[engine]

    def exchange(self, wait_key: str, own: Collection[int], has_failed: bool = False) -> tuple[set[int], bool]:
        """Tell the other engines what this one has, and return the same of all engines, as far as known.

        Args:
            wait_key: Name of what the engines generate for; what they told for anything else is left out.
            own: Numbers of this engine's complete groups.
            has_failed: Whether this engine has failed.

        Returns:
            Numbers of the complete groups, and whether an engine has failed.
        """
        found, some_failed = set(own), has_failed
        if self._store is None:
            return found, some_failed
        with contextlib.suppress(RuntimeError):  # the store's rank is gone, which the next collective reports
            self._store.set(self._own_key, json.dumps([wait_key, sorted(own), has_failed]))
            if self._store.check(self._keys):
                for told in self._store.multi_get(self._keys):
                    its_key, numbers, failed = json.loads(told)
                    if its_key == wait_key:
                        found.update(numbers)
                        some_failed |= failed
        return found, some_failed


class EnoughGroups:
    """Returns, when it is called, whether a step need not wait for more groups. Not collective.

    Once it is true of one engine it becomes true of all, since groups stay complete. It is true too when an engine has
    failed, so that the others need not wait for it.

    Args:
        own: Returns the numbers of this engine's complete groups.
        suffice: Returns whether some complete groups are enough, given the numbers of all.
        complete_groups: Exchanges the numbers among engines.
        wait_key: Name of what the engines generate for, which is another one after a fault.
    """

    def __init__(
        self,
        own: Callable[[], Sequence[int]],
        suffice: Callable[[Collection[int]], bool],
        complete_groups: CompleteGroups,
        wait_key: str,
    ) -> None:
        self._own = own
        self._suffice = suffice
        self._complete_groups = complete_groups
        self._wait_key = wait_key
        self._is_enough = False
        self._num_told = -1
        self._next_poll = 0.0

    def __call__(self) -> bool:
        if self._is_enough:
            return True
        own = self._own()
        if len(own) != self._num_told or time.monotonic() >= self._next_poll:
            complete, some_failed = self._complete_groups.exchange(self._wait_key, own)
            self._is_enough = some_failed or self._suffice(complete)
            self._num_told, self._next_poll = len(own), time.monotonic() + POLL_S
        return self._is_enough

    def tell_failure(self) -> None:
        """Tell the other engines that this one has failed, before it waits for them in a collective."""
        self._complete_groups.exchange(self._wait_key, self._own(), has_failed=True)
