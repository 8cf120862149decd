"""Checks of sleep and wake: memory is released, and all weights and caches are replaced."""

from __future__ import annotations

import pytest

from rlplug.testing.base import EngineChecks
from rlplug.testing.bench import GREEDY, Bench
from rlplug.testing.claims import applies_to


class SleepChecks(EngineChecks):
    """Checks of ``sleep`` and ``wake``, in the order of a step: wake weights, sync, wake KV cache, sleep."""

    @applies_to("sleep", is_claimed=False)
    def test_sleep_that_is_not_claimed_is_refused(self, bench: Bench) -> None:
        engine = bench.holding()
        with pytest.raises(NotImplementedError, match="sleep"):
            engine.sleep()
        with pytest.raises(NotImplementedError, match="sleep"):
            engine.wake("weights")

    @applies_to("sleep")
    def test_round_of_a_step(self, bench: Bench) -> None:
        bench.holding()
        for _ in range(2):
            bench.sleep()
            bench.wake_and_sync()
            bench.assert_holds(
                "changed",
                "round",
                [3, 400],
                'After sleep, wake("weights"), update_weights and wake("kv_cache") the engine must be like new: all '
                "weights are those that were sent, and no block of the former KV cache counts as filled.",
            )

    @applies_to("sleep")
    def test_sleep_frees_memory(self, bench: Bench) -> None:
        engine = bench.holding()
        bench.generate(bench.requests("fills the cache", [100]), GREEDY)
        awake = self.device_bytes_in_use(engine)
        if awake is None:
            pytest.skip(f"nothing measures memory on {self.placement().device}: override device_bytes_in_use")
        bench.sleep()
        asleep = self.device_bytes_in_use(engine)
        bench.wake_and_sync()
        assert asleep is not None
        needed = bench.policy().num_bytes() if self.min_freed_bytes is None else self.min_freed_bytes
        assert awake - asleep >= needed, (
            f"sleep freed {awake - asleep} bytes of {awake} in use, and must free at least {needed}: release weights "
            "and KV cache from the device, and torch's cached blocks too."
        )
