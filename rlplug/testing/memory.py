"""Checks of sleep and wake: memory is given back, and what slept is not used before it was sent again."""

from __future__ import annotations

import pytest

from rlplug.errors import RunError
from rlplug.interfaces.rollout import RolloutEngine
from rlplug.testing.base import EngineChecks
from rlplug.testing.bench import GREEDY, Bench
from rlplug.testing.claims import applies_to


class SleepChecks(EngineChecks):
    """``sleep`` and ``wake``, in the order in which a step uses them: wake weights, sync, wake KV cache, sleep."""

    @applies_to("sleep", is_claimed=False)
    def test_sleep_that_is_not_claimed_is_refused(self, bench: Bench) -> None:
        engine = bench.holding()
        for call in (engine.sleep, engine.wake):
            with pytest.raises(NotImplementedError, match="sleep"):
                call()

    @applies_to("sleep")
    def test_round_of_a_step(self, bench: Bench) -> None:
        engine = bench.holding()
        for _ in range(2):
            engine.sleep()
            bench.forget_weights()
            bench.wake_and_sync()
            bench.assert_holds(
                "changed",
                "round",
                [3, 400],
                "After sleep, wake(['weights']), update_weights and wake(['kv_cache']) the engine must be as new: all "
                "weights are those that were sent, and no block of the former KV cache counts as filled.",
            )

    @applies_to("sleep")
    def test_sleep_frees_memory(self, bench: Bench) -> None:
        engine = bench.holding()
        engine.generate(bench.requests("fills the cache", [100]), GREEDY)
        awake = self.device_bytes_in_use(engine)
        if awake is None:
            pytest.skip(f"nothing measures memory on {self.placement().device}: override device_bytes_in_use")
        bench.forget_weights()
        engine.sleep()
        asleep = self.device_bytes_in_use(engine)
        bench.wake_and_sync()
        assert asleep is not None
        needed = bench.policy().num_bytes() if self.min_freed_bytes is None else self.min_freed_bytes
        assert awake - asleep >= needed, (
            f"sleep freed {awake - asleep} bytes, of {awake} in use, and must free {needed} at least: the weights and "
            "the KV cache have to leave the device, and torch's cached blocks with them."
        )

    @applies_to("sleep")
    def test_asleep_engine_refuses_to_generate(self, bench: Bench) -> None:
        engine = bench.holding()
        bench.forget_weights()
        engine.sleep()
        message = "generate must raise RunError while the engine sleeps."
        self._assert_refuses(engine, bench, message)
        bench.wake_and_sync()

    @applies_to("sleep")
    def test_weights_that_slept_are_stale_until_the_sync(self, bench: Bench) -> None:
        engine = bench.holding()
        bench.forget_weights()
        engine.sleep()
        engine.wake()
        message = "generate must raise RunError after wake, until update_weights: weights that slept are stale."
        self._assert_refuses(engine, bench, message)
        bench.sync("changed")
        bench.assert_holds("changed", "stale", [3], "A sync after wake() must be enough.")

    @applies_to("sleep")
    def test_kv_cache_sleeps_alone(self, bench: Bench) -> None:
        engine = bench.holding()
        bench.assert_holds("first", "cache", [400], "")
        engine.sleep(["kv_cache"])
        engine.wake(["kv_cache"])
        bench.assert_holds(
            "first",
            "cache",
            [400],
            "Weights stay while only the KV cache sleeps, and no block of the cache may count as filled after it.",
        )

    def _assert_refuses(self, engine: RolloutEngine, bench: Bench, message: str) -> None:
        with pytest.raises(RunError):  # noqa: PT012 - says what was expected
            engine.generate(bench.requests("asleep", [3]), GREEDY)
            pytest.fail(message)
