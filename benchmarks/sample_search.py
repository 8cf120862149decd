"""How long the page of samples takes to index and search a large ``samples.jsonl``.

``python benchmarks/sample_search.py --steps 20000 --per_step 12 --characters 4000``
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from rlplug_watch.page.sample_index import SampleFilter, SampleIndex, search


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--per_step", type=int, default=12)
    parser.add_argument("--characters", type=int, default=4000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / "samples.jsonl"
        words = "The sum of the digits is 7, so we try again: é. "
        text = (words * (options.characters // len(words) + 1))[: options.characters]
        with path.open("w") as file:
            for step in range(1, options.steps + 1):
                for index in range(options.per_step):
                    record = {
                        "step": step,
                        "phase": "train",
                        "prompt_uid": f"train.jsonl:{step}",
                        "prompt": "What is 3 + 4?",
                        "completion": text,
                        "answer": "7",
                        "reward": index / 8,
                        "rewards": {"exact": index / 8},
                        "finish_reason": "stop",
                        "num_tokens": 900,
                        "num_turns": 1,
                        "policy_version": step,
                        "advantage": 0.1,
                        "group": 0,
                        "index": index,
                        "has_tokens": index < 8,
                    }
                    file.write(json.dumps(record) + "\n")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        index = SampleIndex(path)
        began, longest = time.perf_counter(), 0.0
        while not index.is_complete or not len(index.rows):
            start = time.perf_counter()
            index.grow(0.8)
            longest = max(longest, time.perf_counter() - start)
        print(f"{path.stat().st_size / 1e9:.2f} GB, {len(index.rows):,} samples")
        print(f"index: {time.perf_counter() - began:.1f} s, requests of at most {longest:.2f} s")
        for name, wanted, sort in (
            ("newest", SampleFilter(), "newest"),
            ("filter and sort", SampleFilter(reward_min=0.5, first_step=100), "-reward"),
            ("text that is rare", SampleFilter(text="train.jsonl:7"), "newest"),
            ("text that is nowhere", SampleFilter(text="nowhere"), "newest"),
        ):
            began, start, requests, found = time.perf_counter(), 0, 0, 0
            while found < 50 and start < len(index.rows):
                page = search(index, wanted, sort, start, 50, 0.8)
                found, start, requests = found + len(page.samples), page.next, requests + 1
                if page.next >= page.num_candidates:
                    break
            print(f"{name}: {time.perf_counter() - began:.2f} s in {requests} requests, {found} found")
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"memory: {after - before:.0f} MiB more")


if __name__ == "__main__":
    main()
