"""Checks of an engine's start and close; the core keeps the order of the calls between them."""

from __future__ import annotations

from rlplug.testing.base import EngineChecks
from rlplug.testing.bench import Bench
from rlplug.testing.claims import applies_to


class FirstChecks(EngineChecks):
    """Checks of an engine that never had weights. They run first, before others sync some."""

    @applies_to("sleep")
    def test_sleeps_before_the_first_sync(self, bench: Bench) -> None:
        bench.unsynced()
        bench.sleep()
        bench.wake_and_sync()
        bench.assert_holds("changed", "first sync", [3, 20], "A run's first call after start is sleep.")


class LastChecks(EngineChecks):
    """Checks that close the engine."""

    @applies_to("restart")
    def test_starts_again_after_close(self, bench: Bench) -> None:
        """The core restarts an engine in this way after an ``EngineFault``."""
        bench.holding("first", family="qwen2")
        bench.close()
        bench.start()
        bench.sync("changed")
        bench.assert_holds(
            "changed",
            "started again",
            [3, 20],
            "After close, start must build the engine anew: weights, caches, processes and connections.",
        )

    def test_closes_twice(self, bench: Bench) -> None:
        bench.holding("first", family=bench.family)
        bench.close()
        bench.close()
        bench.discard()
