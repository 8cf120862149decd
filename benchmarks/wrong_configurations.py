"""How wrong configurations and files end, by kind: in one message, or otherwise.

Runs a sample of what ``tests/integration/config_mutations.py`` and ``wrong_*.py`` generate, each up to where it would
load a model or start its rollouts, on the rlplug that is imported, so that two commits are compared with one sample::

    python benchmarks/wrong_configurations.py --share 0.1 --seed 1 --out after.jsonl
    PYTHONPATH=OLDER python benchmarks/wrong_configurations.py --share 0.1 --seed 1 --out before.jsonl
    python benchmarks/wrong_configurations.py --tables before.jsonl after.jsonl
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any, Final

TABLES: Final = ("wrong_inputs", "wrong_structures", "wrong_prompts", "wrong_models", "wrong_habits")
"""Modules that generate wrong runs, up to their first rollout."""
ENDINGS: Final = ("message", "accepted", "no key", "no remedy", "raw", "long message", "traceback", "hang")
MAX_MEMORY: Final = 12 << 30
"""Address space of each run, in bytes: some ask for more than any machine has."""


def sample(share: float, seed: int, mutations: tuple[str, ...] | None) -> list[tuple[str, str, Any]]:
    """Return cases in random order, each with its table and until where it runs."""
    cases: list[tuple[str, str, Any]] = []
    for table in TABLES:
        cases += [(table, "start_run", case) for case in importlib.import_module(table).cases()]
    if mutations is not None:
        every = importlib.import_module("config_mutations").cases(mutations)
        cases += [("config_mutations", "build_models", case) for case in every]
    draw = random.Random(seed)
    chosen = [case for case in cases if draw.random() < share]
    draw.shuffle(chosen)
    return chosen


def kind_of(table: str, name: str) -> str:
    """Return the kind of a case: the beginning of its name, but of a mutated value its change."""
    return f"value: {name.rpartition(': ')[2]}" if table == "config_mutations" else name.partition(":")[0]


def run_all(chosen: list[tuple[str, str, Any]], out: Path, limit_s: float) -> None:
    runner = importlib.import_module("wrong_command_lines")
    runner.import_all()
    runner.LIMIT_S = limit_s
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    import rlplug

    print(f"{len(chosen)} cases with {rlplug.__file__}", file=sys.stderr)
    with out.open("a") as file:
        for table, until, case in chosen:
            began = time.monotonic()
            ending = runner.run(case, until)
            row = {"table": table, "case": case.name, "ending": ending.kind, "seconds": time.monotonic() - began}
            print(json.dumps(row | {"output": ending.output[-3000:]}), file=file, flush=True)


def table_of(files: list[Path]) -> str:
    """Return a table of the cases that every file has: how many of each kind ended how, a column for each file."""
    found = [{(row["table"], row["case"]): row for row in map(json.loads, file.open())} for file in files]
    common = set.intersection(*(set(each) for each in found))
    kinds: dict[tuple[str, str], list[collections.Counter[str]]] = {}
    for table, name in common:
        counts = kinds.setdefault((table, kind_of(table, name)), [collections.Counter() for _ in files])
        for counter, rows in zip(counts, found, strict=True):
            counter[rows[table, name]["ending"]] += 1
    titles = " | ".join(file.stem for file in files)
    lines = [f"| kind | cases | {titles} |", f"|---|---:|{'---|' * len(files)}"]
    for (_, kind), counters in [*sorted(kinds.items()), (("", "all"), _sums(kinds.values()))]:
        cells = [", ".join(f"{counter[name]} {name}" for name in ENDINGS if counter[name]) for counter in counters]
        lines.append(f"| {kind} | {counters[0].total()} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _sums(kinds: Any) -> list[collections.Counter[str]]:
    return [sum(column, collections.Counter()) for column in zip(*kinds, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.1, help="share of the cases to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutations", nargs="*", help="algorithms whose values are mutated too; '' is the quickstart")
    parser.add_argument("--limit-s", type=float, default=240.0, help="seconds after which a run counts as hanging")
    parser.add_argument("--out", type=Path, help="file of JSON lines to write to")
    parser.add_argument("--tables", type=Path, nargs="+", help="files to make a table of, of one sample")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
    if options.tables:
        print(table_of(options.tables))
        return
    mutations = None if options.mutations is None else tuple(options.mutations)
    run_all(sample(options.share, options.seed, mutations), options.out, options.limit_s)


if __name__ == "__main__":
    main()
