"""Measures what a step costs the host between the engine's answer and the first micro-batch on the device.

    python benchmarks/host_cost.py --checkout ../before . --tokens 0.1 1 8 --ranks 1 2 4

Each table is of ``--ranks`` processes, joined by gloo, that take a step's completions through the product's own code.
An engine that generates nothing answers at once with tuples of random tokens and logprobs, Python objects as vLLM and
a server's JSON give them. With several checkouts, each size runs in all of them, one after another, so that what is
compared ran on the same machine at about the same time. Each runs with the interpreter of its own ``.venv``.

The phases:

- ``completions``: make the engine's answers into ``Completion``;
- ``check``: the agent loop checks the answers and appends them to their trajectories;
- ``decode``: the tokenizer makes the text that rewards and logs read;
- ``samples``: the rest of ``to_samples``;
- ``gather``: exchange the scored samples between ranks, as versions of the hook API below 2 do;
- ``select``: sort, let GRPO select groups, and compute the rollout's metrics;
- ``batch``: make the samples arrays or tensors;
- ``advantages``: GRPO's;
- ``plan``: cut the rows into mini- and micro-batches;
- ``exchange``: bring the rows to the ranks that compute them, from version 2 on;
- ``load``: select, pack and move the first micro-batch.

A row says: wall and CPU seconds of the rank that needed most, and by how many GiB a process grew at most above what it
held before the phase. ``all`` has the peak of a whole process, with the engine's answers and 0.4 GiB of imports.
Rewards are drawn, because what a reward costs is its own matter. Where processes outnumber cores, read the CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GROUP_SIZE = 16
SIZES = {0.1: (8, 781), 1.0: (32, 1953), 8.0: (64, 7812), 40.0: (512, 4882)}
"""Million tokens: groups, and tokens of the mean completion. The last is DAPO's published step."""
PROMPT_TOKENS = 100
END = 2
"""End token of every completion; the others are drawn."""
GIB = 1 << 30
WORKER = "RLPLUG_HOST_COST"
"""Environment variable with what a rank measures, as JSON."""
SCRIPT = Path(__file__).resolve().with_name("host_cost_rank.py")


def lengths_of(num_completions: int, mean: int) -> list[int]:
    """Return lengths in tokens with a long tail and the given mean: log-normal, cut at four times its median."""
    generator = random.Random(0)
    drawn = [min(generator.lognormvariate(0.0, 0.7), 4.0) for _ in range(num_completions)]
    return [max(1, round(each * mean * num_completions / sum(drawn))) for each in drawn]


@dataclass(frozen=True)
class Cell:
    """One run: a checkout, a size and a number of ranks."""

    checkout: Path
    million: float
    num_ranks: int

    def run(self, tokenizer: Path) -> dict[str, list[float]]:
        """Return the phases' rows: of each figure the largest of any rank."""
        groups, mean = SIZES[self.million]
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        work = {"ranks": self.num_ranks, "groups": groups, "mean": mean, "port": port, "tokenizer": str(tokenizer)}
        python = self.checkout / ".venv/bin/python"
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder) / str(rank) for rank in range(self.num_ranks)]
            ranks = []
            for rank, output in enumerate(outputs):
                asked = {WORKER: json.dumps({**work, "rank": rank, "output": str(output)}), "OMP_NUM_THREADS": "1"}
                command = [str(python if python.exists() else sys.executable), str(SCRIPT)]
                environment = {**os.environ, **asked, "PYTHONPATH": str(self.checkout)}
                ranks.append(subprocess.Popen(command, cwd=self.checkout, env=environment))
            codes = [process.wait() for process in ranks]
            if any(codes):
                sys.exit(f"{self}: a rank failed")
            results = [json.loads(output.read_text()) for output in outputs]
        rows = {
            name: [max(result["phases"][name][i] for result in results) for i in range(3)]
            for name in results[0]["phases"]
        }
        rows["all"] = [sum(row[i] for row in rows.values()) for i in range(2)]
        rows["all"].append(max(result["peak"] for result in results))
        tokens, loaded = results[0]["tokens"], results[0]["loaded"]
        where = f"{self.checkout}, {self.num_ranks} ranks"
        print(f"{where}: {tokens:,} tokens in {groups * GROUP_SIZE:,} completions; rank 0 loads {loaded}", flush=True)
        return rows


def table(cells: dict[Path, dict[str, list[float]]]) -> Iterator[str]:
    """Yield a Markdown table with a row for each phase, and three columns for each checkout."""
    yield "| phase |" + "".join(f" {path.name} wall s | CPU s | GiB |" for path in cells)
    yield "|---|" + "---:|---:|---:|" * len(cells)
    names = dict.fromkeys(name for rows in cells.values() for name in rows)
    for name in [*(name for name in names if name != "all"), "all"]:
        cell = (
            f" {row[0]:.3f} | {row[1]:.3f} | {row[2] / GIB:.3f} |" if (row := rows.get(name)) else " | | |"
            for rows in cells.values()
        )
        yield f"| {name} |" + "".join(cell)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("--checkout", type=Path, nargs="+", default=[here], help="by default this one")
    parser.add_argument("--tokens", type=float, nargs="+", default=[0.1, 1.0, 8.0], choices=SIZES, help="in millions")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    tokenizer = here / "models/SmolLM2-135M-Instruct"
    parser.add_argument("--tokenizer", type=Path, default=tokenizer, help="folder; scripts/fetch_smollm2.py gets one")
    options = parser.parse_args()
    for million in options.tokens:
        for num_ranks in options.ranks:
            cells = {
                path.resolve(): Cell(path.resolve(), million, num_ranks).run(options.tokenizer.resolve())
                for path in options.checkout
            }
            print(f"\n{million:g} million tokens, {num_ranks} ranks\n")
            print("\n".join(table(cells)) + "\n", flush=True)


if __name__ == "__main__":
    main()
