"""Ends the generation of a step as soon as enough groups are complete, over all engines."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

from torch._C._distributed_c10d import Store

POLL_S: Final = 0.05
"""Shortest time between two questions whether the groups are enough, in seconds."""


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

    def exchange(self, step_key: str, own: Collection[int]) -> set[int]:
        """Tell the other engines which groups of this one are complete, and return those of all, as far as known.

        Args:
            step_key: Name of run and step; what engines told in other steps is left out.
            own: Numbers of this engine's complete groups.
        """
        found = set(own)
        if self._store is None:
            return found
        with contextlib.suppress(RuntimeError):  # the store's rank is gone, which the next collective reports
            self._store.set(self._own_key, json.dumps([step_key, sorted(own)]))
            if self._store.check(self._keys):
                for told in self._store.multi_get(self._keys):
                    its_step, numbers = json.loads(told)
                    if its_step == step_key:
                        found.update(numbers)
        return found


class EnoughGroups:
    """Returns, when it is called, whether a step has the groups that it wants. Not collective.

    Once it is true of one engine it becomes true of all, since groups stay complete.

    Args:
        own: Returns the numbers of this engine's complete groups.
        suffice: Returns whether some complete groups are enough, given the numbers of all.
        board: Exchanges the numbers among engines.
        step_key: Name of run and step.
    """

    def __init__(
        self,
        own: Callable[[], Sequence[int]],
        suffice: Callable[[Collection[int]], bool],
        board: CompleteGroups,
        step_key: str,
    ) -> None:
        self._own = own
        self._suffice = suffice
        self._board = board
        self._step_key = step_key
        self._is_enough = False
        self._next_poll = 0.0

    def __call__(self) -> bool:
        if not self._is_enough and time.monotonic() >= self._next_poll:
            self._is_enough = self._suffice(self._board.exchange(self._step_key, self._own()))
            self._next_poll = time.monotonic() + POLL_S
        return self._is_enough
