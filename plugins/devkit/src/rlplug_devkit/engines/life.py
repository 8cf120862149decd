"""Checks of an engine's start, its end, and its faults, and of what it does to the trainer's process meanwhile."""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import psutil
import pytest
from torch import Tensor

from rlplug.interfaces.rollout import EngineFault
from rlplug.types import SamplingParams
from rlplug_devkit.claims import DOES_NOT_APPLY, applies_to
from rlplug_devkit.engines.base import EngineChecks
from rlplug_devkit.engines.bench import GREEDY, Bench
from rlplug_devkit.process_state import Holdings, holdings, num_alive, still_there

CLOSE_S = 20.0
"""Longest time in seconds until the processes of a closed engine are gone."""


class FirstChecks(EngineChecks):
    """Checks of an engine that never had weights. They run first, before others sync some."""

    def test_policy_is_accepted(self, bench: Bench) -> None:
        """Its start comes after ``check`` and ``prepare``, as in a run."""
        engine = bench.unsynced()
        ranks = engine.ranks_per_engine
        assert type(ranks) is int, f"ranks_per_engine is {ranks!r}: give an integer."
        assert ranks >= 1, f"ranks_per_engine is {ranks}: an engine is of one rank at least."

    @applies_to("sleep")
    def test_sleeps_before_the_first_sync(self, bench: Bench) -> None:
        bench.unsynced()
        bench.sleep()
        bench.wake_and_sync()
        bench.assert_holds("changed", "first sync", [3, 20], "A run's first call after start is sleep.")

    def test_process_is_left_as_it_was(self, bench: Bench) -> None:
        """The trainer, rewards and other plugins read these settings. Every call of this engine so far counts."""
        bench.holding()
        bench.sync()
        bench.generate(bench.requests("process", [3]), SamplingParams(4))
        changes = [text for name, text in bench.guard.changes.items() if name not in self.changes_of_process]
        assert not changes, (
            "; ".join(changes) + ". Settings of the trainer's process belong to the trainer: restore them before "
            "a call returns, run in a process of your own, or name what must change in changes_of_process."
        )

    def test_global_random_generators_are_left_alone(self, bench: Bench) -> None:
        """The trainer's own random numbers must not depend on the engine: a resumed run would differ."""
        bench.holding()
        bench.sync()
        bench.generate(bench.requests("generators", [3]), SamplingParams(4))
        assert not bench.guard.generators, (
            f"a call of the engine moved the global generators {sorted(bench.guard.generators)} of the trainer's "
            "process: draw from generators of your own, or restore theirs."
        )


class CounterChecks(EngineChecks):
    """Checks of ``stats`` and ``advice``."""

    def test_counters_begin_anew_with_each_call_of_stats(self, bench: Bench) -> None:
        """A counter that keeps what it returned grows by the same work each time, and stays where nothing was done."""
        bench.holding("endless")
        self._counted(bench, [3, 9])  # caches are full from now on
        seen = [(self._counted(bench, [3, 9]), bench.running().stats()) for _ in range(3)]
        for name in self._in_all([stats for pair in seen for stats in pair]):
            values, idle = [worked[name] for worked, _ in seen], [then[name] for _, then in seen]
            assert not (values == idle and values[0] < values[1] < values[2]), (
                f"stats()[{name!r}] was {values} after three times the same requests, and stayed so without any: "
                "count since the last call of stats, and begin anew."
            )

    def test_counters_are_of_all_rollouts_since_the_last_call(self, bench: Bench) -> None:
        """A step may have several rollouts, and the core asks once."""
        bench.holding("endless")
        works = ([3, 9], [4, 5, 6, 7, 8])
        for work in works:
            self._counted(bench, work)
        alone = [[self._counted(bench, work) for work in works] for _ in range(2)]
        both = [[self._counted(bench, *order) for order in (works, works[::-1])] for _ in range(2)]
        idle = bench.running().stats()
        for name in self._in_all([*alone[0], *alone[1], *both[0], *both[1], idle]):
            (small, large), *repeated = ([stats[name] for stats in pair] for pair in (*alone, *both))
            is_counter = idle[name] == 0 != small != large and repeated[0] == [small, large]
            assert not (is_counter and repeated[1] == repeated[2] == [large, small]), (
                f"stats()[{name!r}] is {small} and {large} after two rollouts, and that of the last one alone after "
                "both: count all rollouts since the last call of stats."
            )

    def _counted(self, bench: Bench, *rollouts: Sequence[int]) -> Mapping[str, float]:
        """Return the counters of these rollouts, each of prompts of these lengths."""
        bench.running().stats()
        for lengths in rollouts:
            bench.generate(bench.requests("counted", lengths), SamplingParams(6))
        return bench.running().stats()

    def _in_all(self, counters: Sequence[Mapping[str, float]]) -> list[str]:
        """Return the names that all of these have; some are measured now and then."""
        return sorted(set.intersection(*({*each} for each in counters)))

    def test_stats_are_finite(self, bench: Bench) -> None:
        engine = bench.holding()
        bench.generate(bench.requests("stats", [3]), GREEDY)
        for name, value in engine.stats().items():
            assert type(name) is str, f"stats() has the key {name!r}, which is no str."
            assert type(value) is float, f"stats()[{name!r}] is {value!r}: give a float."
            assert math.isfinite(value), f"stats()[{name!r}] is {value!r}: give a finite number."

    def test_advice_is_text(self, bench: Bench) -> None:
        engine = bench.holding()
        bench.generate(bench.requests("advice", [3]), GREEDY)
        advice = engine.advice()
        assert type(advice) is list, f"advice() returned {advice!r}: give a list, an empty one when there is none."
        for piece in advice:
            assert type(piece) is str, f"advice() has {piece!r}, which is no str."
            assert piece.strip(), "advice() has an empty piece, and each is printed: leave it out."


class LastChecks(EngineChecks):
    """Checks that close the engine, or end its processes."""

    def test_death_of_its_processes_is_a_fault(self, bench: Bench) -> None:
        """The core starts an engine again after an ``EngineFault``, and after no other error."""
        bench.holding("first")
        processes = bench.own_processes()
        if not processes:
            pytest.skip(f"{DOES_NOT_APPLY}{bench.engine_name} has no processes of its own on this machine")
        for process in processes:
            process.kill()
        began = time.monotonic()
        with pytest.raises(Exception) as error:  # noqa: PT011, PT012 - says what was expected
            bench.generate(bench.requests("dead", [3, 4]), GREEDY)
            pytest.fail("generate returned completions of an engine whose processes were killed.")
        seconds = time.monotonic() - began
        assert isinstance(error.value, EngineFault), (
            f"generate of an engine whose processes were killed must raise EngineFault, and raised {error.value!r}."
        )
        assert seconds < self.deadline_s, f"the fault came after {seconds:.0f} s: watch the process, not a deadline."
        try:
            bench.close()
        except Exception as problem:
            raise AssertionError(f"close after a fault must succeed, and raised {problem!r}.") from problem
        self.assert_ended(processes, "after a fault and close")
        if bench.capabilities.restart:
            bench.start()
            bench.sync("changed")
            bench.assert_holds("changed", "after its death", [3, 20], "The core restarts an engine in this way.")

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

    @applies_to("restart")
    def test_a_start_takes_what_it_is_given(self, bench: Bench) -> None:
        """What was read of the policy of an earlier start is gone."""
        bench.holding("ending", family=bench.family)
        requests, sampling = bench.requests("given again", [3, 20], num_samples=10), SamplingParams(12)
        drawn = Counter(int(token) for each in bench.generate(requests, sampling) for token in each.token_ids)
        end = max(drawn.keys() - {*bench.spec.eos_token_ids}, key=drawn.__getitem__)
        bench.close()
        ends = (*bench.spec.eos_token_ids, end)  # those of the model's files stay: every policy has them
        bench.spec = replace(bench.spec, eos_token_ids=ends)
        bench.start()
        bench.sync("ending")
        for completion in bench.generate(requests, sampling):
            ids = completion.token_ids.tolist()
            first = next((place for place, token in enumerate(ids, start=1) if token in ends), None)
            found, expected = (len(ids), completion.finish_reason), (first or 12, "length" if first is None else "stop")
            assert found == expected, (
                f"started again with the end token {end} too, generate returned {ids} as "
                f"{completion.finish_reason!r}: start must take its PolicySpec anew, and keep nothing of a former one."
            )

    @applies_to("streaming")
    def test_a_start_forgets_what_ran_before(self, bench: Bench) -> None:
        """After a fault the core asks again for what did not come back, by the same names."""
        if not bench.capabilities.restart:
            pytest.skip(f"{DOES_NOT_APPLY}{bench.engine_name} cannot restart")
        engine = bench.holding("endless", family=bench.family)
        requests = bench.requests("asked twice", [3, 8], num_samples=2)
        engine.submit(requests[:2], SamplingParams(3))
        engine.submit(requests[2:], SamplingParams(bench.max_context - 10))
        time.sleep(0.3)  # some are done and not collected, some run
        bench.close()
        bench.start()
        bench.sync("endless")
        advice = "close ends what runs and drops what was not collected: a start begins with no requests."
        early = [completion.request_id for completion in engine.collect(0.3)]
        assert not early, f"started again, collect returned {early}, which were submitted before close. {advice}"
        engine.submit(requests, SamplingParams(5))
        lengths: dict[str, list[int]] = {}
        deadline = time.monotonic() + self.deadline_s
        while len(lengths) < len(requests) and time.monotonic() < deadline:
            for completion in engine.collect(1.0):
                lengths.setdefault(completion.request_id, []).append(len(completion.token_ids))
        assert lengths == {request.request_id: [5] for request in requests}, (
            f"requests that were submitted again after a restart, for 5 tokens each, gave {lengths}. {advice}"
        )

    def test_closes_twice(self, bench: Bench) -> None:
        bench.holding("first", family=bench.family)
        bench.close()
        bench.close()
        bench.discard()

    def test_closes_before_it_was_started(self, bench: Bench) -> None:
        """The core closes the engines of all ranks when one cannot start."""
        try:
            bench.settings.make_engine().close()
        except Exception as problem:
            raise AssertionError(
                f"close must be safe in every state, and raised {problem!r} before start."
            ) from problem

    def test_close_leaves_nothing_behind(self, bench: Bench) -> None:
        """Compares two lives: what the first leaves for good, such as a library's threads, the second may use.

        The second is of a copy of the model in another folder, so that what is kept by its path is there twice.
        """
        copied = f"{bench.spec.path}-copied"
        shutil.copytree(bench.spec.path, copied, dirs_exist_ok=True)
        left: list[Holdings] = []
        num_tensors: list[int] = []
        for path in ("", copied) if bench.capabilities.restart else ("",):
            bench.holding("first", family=bench.family, path=path)
            bench.generate(bench.requests("a life", [3]), GREEDY)
            processes = bench.own_processes()
            bench.close()
            self.assert_ended(processes, "after close")
            bench.discard()
            left.append(holdings())
            num_tensors.append(num_alive((Tensor,)))
        threads, files = left[-1].threads - left[0].threads, left[-1].files - left[0].files
        assert threads <= 0, f"{threads} threads more than before remain after start and close: end them in close."
        assert files <= 0, f"{files} open files or sockets more than before remain after start and close."
        tensors, num_weights = num_tensors[-1] - num_tensors[0], len(list(bench.policy().model.parameters()))
        assert tensors < num_weights / 2, (
            f"{tensors} tensors remain after close, and the model has {num_weights} weights: drop references to them."
        )

    def assert_ended(self, processes: Sequence[psutil.Process], when: str) -> None:
        """Fail unless the engine's processes have ended, and somebody has waited for them."""
        left = still_there(processes, CLOSE_S)
        assert not left, f"{when}, processes of the engine are left: {', '.join(left)}. End them and wait for them."
