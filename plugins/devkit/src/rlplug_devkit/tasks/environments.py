"""Conformance kit of environments: the checks that an environment must pass, from general to special."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
from collections.abc import Callable
from typing import Any, Final

import pytest

from rlplug_devkit.tasks.environment_plays import EnvironmentPlayChecks
from rlplug_devkit.tasks.playing import SEED
from rlplug_devkit.tasks.playing import make_prompt as make_prompt

CALLS: Final = ("reset", "step", "close")
TICK_S: Final = 0.005
BLOCKED_S: Final = 0.06
"""Time without a turn of the event loop, in each of some trajectories, that a call must have taken."""
NUM_TIMED: Final = 3


class EnvironmentConformance(EnvironmentPlayChecks):
    """Checks of an environment. A subclass must override ``make_environment``, and may override the rest.

    Attributes:
        is_deterministic: Whether the same prompt, seed and turns always have the same answers; without that a run
            cannot be resumed.
    """

    # ---- beside other trajectories --------------------------------------------------------------------------------

    def test_async_calls_let_others_run(self) -> None:
        """Calls that are ``async`` share one event loop, with those of all other trajectories of the rank."""
        environment = self.make_environment()
        if not any(inspect.iscoroutinefunction(getattr(environment, name)) for name in CALLS):
            pytest.skip("does not apply: no call is async")
        blocked_s = min(asyncio.run(self._longest_wait()) for _ in range(NUM_TIMED))
        assert blocked_s < BLOCKED_S, (
            f"an async call keeps the event loop for {blocked_s:.2g} s, and all other trajectories wait: await what "
            "takes time, such as asyncio.to_thread(...), or make reset and step plain methods, which run in threads."
        )

    async def _longest_wait(self) -> float:
        """Play turns, and return the longest time, in seconds, for which the event loop had no turn."""
        longest, last = 0.0, time.perf_counter()

        async def tick() -> None:
            nonlocal longest, last
            while True:
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
                await asyncio.sleep(TICK_S)

        async def call(function: Callable[..., Any], *args: Any) -> Any:
            is_async = inspect.iscoroutinefunction(function)
            return await (function(*args) if is_async else asyncio.to_thread(function, *args))

        environment, ticking = self.make_environment(), asyncio.create_task(tick())
        object.__setattr__(environment, "response_template", None)
        with contextlib.suppress(Exception):  # other checks fail with it
            await call(environment.reset, self.prompts()[0], SEED)
            for turn in self.turns():
                if (await call(environment.step, turn)).done:
                    break
        with contextlib.suppress(Exception):
            await call(environment.close)
        ticking.cancel()
        return max(longest, time.perf_counter() - last)

    # ---- what it leaves behind ------------------------------------------------------------------------------------

    def test_trajectories_leave_nothing_behind(self) -> None:
        """Those that end before they are done, and whole ones."""
        for turns in (self.turns()[:1], self.turns()):
            self._require_nothing_left("a trajectory", functools.partial(self._play, self.prompts()[0], turns))

    def test_the_process_is_left_as_it_was(self) -> None:
        """Also by a first call, in an earlier check: a change that is made once is there in all later ones."""
        self._play(self.prompts()[0], self.turns())
        self._require_unchanged_process("an environment")

    def test_calls_replace_nothing_of_the_process(self) -> None:
        """Not for a moment either: calls of other trajectories run meanwhile."""
        self._skip_after_failure()
        self._require_nothing_borrowed("an environment", lambda: self._play(self.prompts()[0], self.turns()))
