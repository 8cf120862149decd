"""Orders of events that a ledger may meet, drawn at random.

    python tests/ledger_cases.py 1000000

runs as many cases, each from its own seed, and prints what they covered.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable

from rlplug.rollout.partial.ledger import GroupLedger


def run_ledger_case(rng: random.Random) -> dict[str, int]:
    """Drive a ledger through steps in which groups end in any order, and checkpoints come at any time."""
    per_step, bound = rng.randint(1, 5), rng.randint(0, 4)
    ledger = GroupLedger(per_step, rng.randint(per_step, 30), bound)
    reject = rng.choice([0.0, 0.3, 1.0])
    gone, stats = [], {"steps": 0, "groups": 0, "waits": 0, "staleness": 0}
    for version in range(rng.randint(1, 12)):
        num_missing = per_step
        for _ in range(3):  # the step's first round, and refills
            while ledger.num_startable(num_missing):
                assert len(ledger.open) < (bound + 1) * per_step
                ledger.start(version, num_engines=2)
            running = [number for number, group in ledger.open.items() if not group.is_complete]
            rng.shuffle(running)
            seen = set(rng.sample(running, rng.randint(0, len(running))))  # by an engine that does not know of all
            if ledger.choose(num_missing, version, seen) is not None:
                assert ledger.choose(num_missing, version, running) is not None
            while (chosen := ledger.choose(num_missing, version)) is None:
                enough = sum(group.is_complete for group in ledger.open.values()) >= num_missing
                stats["waits"] += enough  # for groups that would grow too old
                ledger.complete([running.pop()])  # IndexError: it would wait for ever
            assert chosen == sorted(chosen)
            assert len(chosen) == num_missing
            taken = ledger.close(chosen)
            stats["staleness"] = max(stats["staleness"], *(version - group.version for group in taken))
            assert stats["staleness"] <= bound
            gone += chosen
            num_missing -= sum(rng.random() >= reject for _ in taken)
            ledger = reloaded(ledger)
            if num_missing == 0:
                break
        assert ledger.is_in_time(version + 1)
        stats["steps"] += 1
    stats["groups"] = len(gone)
    assert sorted(gone + list(ledger.open)) == list(range(ledger.num_started))
    return stats


def reloaded(ledger: GroupLedger) -> GroupLedger:
    """Return what a checkpoint makes of a ledger, with the same capacity."""
    loaded = GroupLedger(ledger.groups_per_step, ledger.max_open, ledger.max_staleness)
    loaded.load_state_dict(ledger.state_dict())
    assert loaded == ledger
    assert [loaded.num_startable(wanted) for wanted in range(4)] == [ledger.num_startable(n) for n in range(4)]
    return loaded


def run_cases(run_case: Callable[[int], dict[str, int]]) -> None:
    """Run as many cases as the command line says, and print sums of what they covered, and the largest staleness."""
    count, began, total = int(sys.argv[1]), time.perf_counter(), dict[str, int]()
    for seed in range(count):
        try:
            found = run_case(seed)
        except BaseException:
            print(f"seed {seed}", flush=True)
            raise
        for name, value in found.items():
            total[name] = max(total.get(name, 0), value) if name == "staleness" else total.get(name, 0) + value
        if (seed + 1) % 10_000 == 0 or seed + 1 == count:
            print(f"{seed + 1} cases, {time.perf_counter() - began:.0f} s: {total}", flush=True)


if __name__ == "__main__":
    run_cases(lambda seed: run_ledger_case(random.Random(seed)))
