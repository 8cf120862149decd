"""Orders of events that a queue may meet, drawn at random.

    python plugins/async/tests/group_queue_cases.py 1000000 --processes 8

runs as many cases, each from its own seed, and prints what they covered.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable

from rlplug_async.group_queue import GroupQueue


def run_case(rng: random.Random) -> dict[str, int]:
    """Drive a queue through steps in which groups end in any order, and checkpoints come at any time."""
    per_step, bound = rng.randint(1, 5), rng.randint(0, 4)
    queue = GroupQueue(per_step, rng.randint(per_step, 30), bound)
    reject = rng.choice([0.0, 0.3, 1.0])
    gone, stats = [], {"steps": 0, "groups": 0, "waits": 0, "staleness": 0}
    for version in range(rng.randint(1, 12)):
        num_missing = per_step
        for _ in range(3):  # the step's first round, and refills
            while queue.num_startable(num_missing):
                assert len(queue.open) < (bound + 1) * per_step
                queue.start(version, num_engines=2)
            running = [number for number, group in queue.open.items() if not group.is_complete]
            rng.shuffle(running)
            seen = set(rng.sample(running, rng.randint(0, len(running))))  # by an engine that does not know of all
            if queue.choose(num_missing, version, seen) is not None:
                assert queue.choose(num_missing, version, running) is not None
            while (chosen := queue.choose(num_missing, version)) is None:
                enough = sum(group.is_complete for group in queue.open.values()) >= num_missing
                stats["waits"] += enough  # for groups that would grow too old
                queue.complete([running.pop()])  # IndexError: it would wait for ever
            assert chosen == sorted(chosen)
            assert len(chosen) == num_missing
            taken = queue.close(chosen)
            stats["staleness"] = max(stats["staleness"], *(version - group.version for group in taken))
            assert stats["staleness"] <= bound
            gone += chosen
            num_missing -= sum(rng.random() >= reject for _ in taken)
            queue = reloaded(queue)
            if num_missing == 0:
                break
        assert queue.is_in_time(version + 1)
        stats["steps"] += 1
    stats["groups"] = len(gone)
    assert sorted(gone + list(queue.open)) == list(range(queue.num_started))
    return stats


def reloaded(queue: GroupQueue) -> GroupQueue:
    """Return what a checkpoint makes of a queue, with the same capacity."""
    loaded = GroupQueue(queue.groups_per_step, queue.max_open, queue.max_staleness)
    loaded.load_state_dict(queue.state_dict())
    assert loaded == queue
    assert [loaded.num_startable(wanted) for wanted in range(4)] == [queue.num_startable(n) for n in range(4)]
    return loaded


LONGEST_CASE_S = 600
SEEDS_AT_A_TIME = 200


def run_cases(run_case: Callable[[int], dict[str, int]]) -> None:
    """Run as many cases as the command line says, on as many processes, and print what they covered.

    The last line has sums over the cases, and the largest staleness. A case that fails, or takes more than
    ``LONGEST_CASE_S``, ends the run with status 1 and its seed.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int, help="number of cases")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the cases")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first case")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes started below
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.count)
    parts = [seeds[start : start + SEEDS_AT_A_TIME] for start in range(0, arguments.count, SEEDS_AT_A_TIME)]
    began, total = time.perf_counter(), dict[str, int]()
    spawned = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.processes, spawned) as pool:
        for found, failure in pool.map(functools.partial(run_seeds, run_case), parts):
            if failure:
                pool.shutdown(wait=False, cancel_futures=True)
                sys.exit(failure)
            add(total, found)
    seconds = time.perf_counter() - began
    print(f"{arguments.count} cases from seed {seeds[0]}, {arguments.processes} processes, {seconds:.0f} s: {total}")


def run_seeds(run_case: Callable[[int], dict[str, int]], seeds: range) -> tuple[dict[str, int], str]:
    """Return what the cases covered, and the seed and traceback of the first that failed, or an empty string."""
    signal.signal(signal.SIGALRM, fail_late)
    total = dict[str, int]()
    for seed in seeds:
        signal.alarm(LONGEST_CASE_S)
        try:
            add(total, run_case(seed))
        except BaseException:  # noqa: BLE001 - whatever it is, it is of this seed
            return total, f"seed {seed} failed\n{traceback.format_exc()}"
        finally:
            signal.alarm(0)
    return total, ""


def fail_late(*_: object) -> None:
    raise AssertionError(f"the case takes more than {LONGEST_CASE_S} s")


def add(total: dict[str, int], found: dict[str, int]) -> None:
    for name, value in found.items():
        total[name] = max(total.get(name, 0), value) if name == "staleness" else total.get(name, 0) + value


def run_seed(seed: int) -> dict[str, int]:
    return run_case(random.Random(seed))


if __name__ == "__main__":
    run_cases(run_seed)
