"""Checks of memory: the plan, what sleep releases, and that nothing grows from step to step."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import pytest

from rlplug.interfaces.memory import EngineMemory, EngineMemoryRequest
from rlplug.interfaces.rollout import RolloutEngine
from rlplug.types import GIB
from rlplug_devkit.claims import DOES_NOT_APPLY, applies_to
from rlplug_devkit.engines.base import EngineChecks
from rlplug_devkit.engines.bench import GREEDY, Bench, Variant
from rlplug_devkit.models import Family
from rlplug_devkit.process_state import holdings

NUM_ROUNDS = 8
"""Rounds of a run after which memory is compared, after a few others."""
NUM_MEASURED = 3
"""How often growth is measured before it counts as a leak."""
DEVICE_BYTES = 80 * GIB
VARIANTS: tuple[Variant, ...] = ("changed", "first")
"""Weights of the rounds of a step, one after the other."""


class PlanChecks(EngineChecks):
    """Checks of ``plan_memory``, by which a run decides whether the engine sleeps, and how much it may keep."""

    @applies_to("colocated")
    def test_memory_plan_says_something(self, bench: Bench) -> None:
        """The plan is made before the engine starts, and without a GPU; an engine may have none."""
        small, large = self.plan_of(bench, "qwen2"), self.plan_of(bench, "experts")
        if small[0] is None and large[0] is None:
            pytest.skip(f"{DOES_NOT_APPLY}plan_memory returns None: the engine knows no plan")
        for plan, needs in (small, large):
            assert isinstance(plan, EngineMemory), (
                f"plan_memory returned {plan!r}: return an EngineMemory before start and without a GPU, or None always."
            )
            numbers = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if f.type in ("int", int)}
            wrong = {name: number for name, number in numbers.items() if type(number) is not int or number < 0}
            assert not wrong, f"plan_memory returned {wrong}: give bytes, as integers that are not negative."
            least = needs.parameters * self.dtype.itemsize // 2
            assert plan.weights >= least, f"plan_memory gives {plan.weights} bytes to weights of {2 * least} bytes."
            assert plan.kv_cache + plan.other > 0, "plan_memory gives no bytes to the KV cache and to forward passes."
            assert plan.awake <= DEVICE_BYTES, f"plan_memory takes {plan.awake} bytes of a GPU of {DEVICE_BYTES}."
        assert small[0].weights < large[0].weights, (
            f"plan_memory gives {small[0].weights} bytes to the weights of a model with {small[1].parameters} "
            f"parameters, and {large[0].weights} to {large[1].parameters}."
        )
        (one, _), many = self.plan_of(bench, "qwen2", completions=1), small[0]
        if 0 < one.rows < many.rows:
            assert one.kv_cache < many.kv_cache, (
                f"plan_memory gives {many.kv_cache} bytes to the KV cache of {many.rows} completions at once, and "
                f"{one.kv_cache} to that of {one.rows}: it grows with them."
            )

    def test_sizes_are_its_own_options(self, bench: Bench) -> None:
        """``rlplug plan`` writes them below ``rollout``, and a run makes the engine with them."""
        engine = bench.settings.make_engine()
        for requests, prompt_tokens in ((1, 512), (1024, 16384)):
            sizes = engine.size_options(bench.spec_of("llama"), requests, prompt_tokens)
            assert isinstance(sizes, Mapping), f"size_options returned {sizes!r}: return options by name, or {{}}."
            taken = inspect.signature(type(engine)).parameters
            if any(option.kind is inspect.Parameter.VAR_KEYWORD for option in taken.values()):
                continue  # it passes them on: only the one who takes them knows them
            unknown = sorted(sizes.keys() - taken.keys())
            assert not unknown, (
                f"size_options({requests}, {prompt_tokens}) returned {unknown[0]!r}, which is no option of the engine: "
                f"{bench.engine_name} has {', '.join(taken) or 'none'}."
            )

    def plan_of(self, bench: Bench, family: Family, completions: int = 64) -> tuple[Any, EngineMemoryRequest]:
        """Return what an engine that was never started plans for a model, and what it was asked."""
        spec, model = bench.spec_of(family), bench.meta_model(family)
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * spec.dtype.itemsize
        parameters = sum(parameter.numel() for parameter in model.parameters())
        sizes = (completions, spec.max_context, config.vocab_size)
        needs = EngineMemoryRequest(DEVICE_BYTES, parameters, per_token, *sizes)
        return bench.settings.make_engine().plan_memory(spec, needs), needs


class RoundChecks(EngineChecks):
    """Checks of many rounds of a run. They come late, when a process has grown to its size."""

    def test_rounds_of_a_run_leave_no_threads_files_or_processes(self, bench: Bench) -> None:
        bench.holding()
        self.run_rounds(bench, 3)
        before = holdings()
        self.run_rounds(bench, NUM_ROUNDS)
        after = holdings()
        grown = {
            "threads": after.threads - before.threads,
            "open files or sockets": after.files - before.files,
            "processes": len(after.processes) - len(before.processes),
        }
        left = [f"{number} {what}" for what, number in grown.items() if number >= NUM_ROUNDS // 2]
        assert not left, f"{NUM_ROUNDS} rounds of update_weights and generate left {' and '.join(left)}."

    def test_rounds_of_a_run_do_not_grow(self, bench: Bench) -> None:
        engine = bench.holding()
        limit = NUM_ROUNDS * bench.policy().num_bytes() // 2
        self.run_rounds(bench, NUM_ROUNDS // 2)
        for _ in range(NUM_MEASURED):  # beside load an allocator grows once; what leaks grows every time
            grown = self.growth(bench, engine)
            if all(num_bytes < limit for num_bytes in grown.values()):
                return
        for where, num_bytes in grown.items():
            assert num_bytes < limit, (
                f"memory of the {where} grew by {num_bytes} bytes in {NUM_ROUNDS} rounds of update_weights and "
                f"generate; half the weights in each would be {limit}. Drop buckets, caches and completions."
            )

    def growth(self, bench: Bench, engine: RolloutEngine) -> dict[str, int]:
        """Return by how many bytes memory grows in ``NUM_ROUNDS`` rounds, by where it is."""
        before, device = holdings(), self.device_bytes_in_use(engine)
        self.run_rounds(bench, NUM_ROUNDS)
        host, after = holdings(), self.device_bytes_in_use(engine)
        grown = {
            "host": host.num_bytes - before.num_bytes,
            "processes of its own": host.num_bytes_below - before.num_bytes_below,
        }
        if self.placement().device.type != "cpu" and device is not None and after is not None:
            grown["device"] = after - device
        return grown

    def run_rounds(self, bench: Bench, number: int) -> None:
        """Sync and generate, as steps of a run do."""
        for _ in range(number):
            bench.sync()
            bench.generate(bench.requests("rounds", [3, 20]), GREEDY)


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
        for variant in VARIANTS:
            bench.generate(bench.requests("round", [3, 400]), GREEDY)  # before the sleep, with other weights
            bench.sleep()
            bench.wake_and_sync(variant)
            bench.assert_holds(
                variant,
                "round",
                [3, 400],
                'After sleep, wake("weights"), update_weights and wake("kv_cache") the engine must be like new: all '
                "weights are those that were sent, no block of the former KV cache counts as filled, and no answer of "
                "before is given again.",
            )

    @applies_to("sleep")
    def test_stats_and_advice_while_asleep(self, bench: Bench) -> None:
        """The core asks for both after a rollout, when the engine may sleep."""
        engine = bench.holding()
        bench.generate(bench.requests("asleep", [3]), GREEDY)
        bench.sleep()
        try:
            assert isinstance(engine.stats(), dict), "stats() must return a dict while the engine sleeps."
            assert isinstance(engine.advice(), list), "advice() must return a list while the engine sleeps."
        except Exception as problem:
            raise AssertionError(f"stats or advice raised {problem!r} while the engine slept.") from problem
        finally:
            bench.wake_and_sync()

    @applies_to("sleep")
    def test_sleep_frees_memory(self, bench: Bench) -> None:
        engine, needed = bench.holding(), self.min_freed_bytes
        if needed is None:  # malloc keeps some pages of what a process on a CPU frees
            share = 0.9 if self.placement().device.type == "cpu" else 1.0
            needed = int(share * bench.policy().num_bytes())
        for _ in range(3):  # other threads of a process on a CPU take memory meanwhile
            bench.generate(bench.requests("fills the cache", [100]), GREEDY)
            awake = self.device_bytes_in_use(engine)
            if awake is None:
                pytest.fail(f"nothing measures memory on {self.placement().device}: override device_bytes_in_use.")
            bench.sleep()
            asleep = self.device_bytes_in_use(engine)
            bench.wake_and_sync()
            assert asleep is not None
            freed = awake - asleep
            if freed >= needed:
                return
        raise AssertionError(
            f"sleep freed {freed} bytes of {awake} in use, and must free at least {needed}: release weights and KV "
            "cache from the device, and torch's cached blocks too."
        )
