"""Measures ``rlplug watch`` on made-up runs: how long its answers take, how large they are, and the memory it holds.

    python benchmarks/watch.py --runs 100 --steps 20000 --columns 66

Metrics are random numbers with all their digits, as a run writes them. Each answer is timed on the server alone, over
HTTP on this machine: at first, when nothing of the files has been read, and again. Then one run grows by a row, and
what its page asks for is timed once more. Seconds are of the wall clock; where other work shares the machine, read
``cpu``, the seconds that the server's process computed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
from aiohttp.test_utils import TestClient, TestServer
from rlplug_watch.page import make_app

NAMED = (
    *("reward/mean", "reward/std", "completion/length_mean", "completion/num_tokens", "throughput/tokens_per_s"),
    *(
        "time/step",
        "time/rollout",
        "time/update",
        "memory/rollout",
        "memory/update",
        "policy/entropy",
        "policy/grad_norm",
    ),
)


def write_runs(root: Path, num_runs: int, num_steps: int, num_columns: int) -> int:
    """Write the runs, of which four differ in their numbers and all in their configuration; return their bytes."""
    names = [*NAMED, *(f"other/metric_{index}" for index in range(num_columns - len(NAMED) - 1))]
    texts = []
    for seed in range(min(4, num_runs)):
        noise = random.Random(seed)
        rows = ({"step": step} | {name: noise.random() for name in names} for step in range(1, num_steps + 1))
        texts.append("".join(json.dumps(row) + "\n" for row in rows))
    for index in range(num_runs):
        folder = root / f"experiment-{index // 10}" / f"{index % 10:03d}"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(texts[index % len(texts)])
        (folder / "run.json").write_text(json.dumps({"status": "finished", "started": "2026-11-20T21:04:11+00:00"}))
        sizes = "batch: {prompts_per_step: 64, group_size: 8}"
        (folder / "config.yaml").write_text(f"model:\n  num_steps: {num_steps}\n  {sizes}\n  seed: {index}\n")
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


class Asking:
    """A client that prints what its questions cost."""

    def __init__(self, client: TestClient[Any, Any]) -> None:
        self.client = client
        self.process = psutil.Process()

    async def ask(self, what: str, *paths: str) -> None:
        began, cpu, size = time.perf_counter(), time.process_time(), 0
        for path in paths:
            async with self.client.get(path) as answer:
                assert answer.status == 200, await answer.text()
                size += len(await answer.read())
        ms, cpu_ms = 1000 * (time.perf_counter() - began), 1000 * (time.process_time() - cpu)
        held = self.process.memory_info().rss / 2**20
        print(f"| {what} | {ms:,.0f} | {cpu_ms:,.0f} | {size / 1024:,.0f} | {held:,.0f} |", flush=True)


async def measure(root: Path, num_runs: int) -> None:
    ids = [f"experiment-{index // 10}/{index % 10:03d}" for index in range(num_runs)]
    some = ["&".join(f"run={quote(run_id, safe='')}" for run_id in ids[at : at + 20]) for at in range(0, num_runs, 20)]
    sparklines = [f"/api/rewards?{runs}" for runs in some]
    loss = [f"/api/curves?{runs}&metric=other%2Fmetric_0&buckets=120" for runs in some]
    entropy = [f"/api/curves?{runs}&metric=policy%2Fentropy&buckets=120" for runs in some]
    tokens = [f"/api/curves?{runs}&metric=policy%2Fentropy&axis=tokens&buckets=120" for runs in some]
    page = f"/api/runs/{quote(ids[0], safe='')}"
    one = f"/api/curves?run={quote(ids[0], safe='')}&metric=reward%2Fmean&buckets=500"
    async with TestClient(TestServer(make_app(root))) as client:
        asking = Asking(client)
        print("| answer | ms | cpu ms | KiB | MiB held |\n|---|---|---|---|---|")
        await asking.ask(f"list of {num_runs} runs, first", "/api/runs")
        await asking.ask(f"list of {num_runs} runs, again", "/api/runs")
        await asking.ask("one curve, first", one)
        await asking.ask("one curve, again", one)
        await asking.ask("page of a run, first", page)
        await asking.ask("page of a run, again", page)
        await asking.ask(f"small curves of {num_runs} runs, first", *sparklines)
        await asking.ask(f"small curves of {num_runs} runs, again", *sparklines)
        await asking.ask(f"a chart of {num_runs} runs, rough", *(f"{path}&rough=1" for path in entropy))
        await asking.ask(f"a chart of {num_runs} runs, the first of the overview", *entropy)
        await asking.ask(f"a chart of {num_runs} runs, again", *entropy)
        await asking.ask(f"a chart of {num_runs} runs, outside the overview", *loss)
        await asking.ask(f"a chart of {num_runs} runs over tokens", *tokens)
        with (root / ids[0] / "metrics.jsonl").open("r+") as file:
            row = json.loads(file.readline())
            file.seek(0, os.SEEK_END)
            file.write(json.dumps(row | {"step": 1_000_000}) + "\n")
        await asking.ask("list, after a new row", "/api/runs")
        await asking.ask("one curve, after a new row", one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--columns", type=int, default=66)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = write_runs(Path(folder), options.runs, options.steps, options.columns)
        what = f"{options.runs} runs, {options.steps:,} steps, {options.columns} columns"
        print(f"{what}: {size / 2**20:,.0f} MiB of files; {os.cpu_count()} cores\n")
        asyncio.run(measure(Path(folder), options.runs))


if __name__ == "__main__":
    main()
