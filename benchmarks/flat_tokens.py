"""Host seconds and MiB of what grows with a step's tokens: packing, loss, advantages. Flat tokens against padded grids.

    python benchmarks/flat_tokens.py                  # this checkout
    python benchmarks/flat_tokens.py --before ../old  # and another one, before 3.0 of the hook API, in turns

Workloads, on the CPU with one thread:

- ``one long row``: a micro-batch of 87 rows and 46,917 tokens, of which one has 32,768: packing, then GRPO's loss and
  its gradient; ``even rows`` is as many tokens in 87 rows of one length.
- ``long tail``: 2,048 completions of 100 to 300 tokens, of which 1% have 32,768, in micro-batches of the default token
  budget: packing, loss and gradient of all of them, and the largest number of entries of a tensor.
- ``GAE``: PPO's advantages of 128 completions of 32,768 tokens.

Each runs in a process of its own, so that its peak of resident memory is its own. Numbers are ratios in one run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PROMPT = 50
WORKLOADS = ("one long row", "even rows", "long tail", "GAE")
ROOT = Path(__file__).resolve().parent.parent


def lengths_of(workload: str) -> list[int]:
    """Return the tokens of each row, prompt included."""
    random = np.random.default_rng(0)
    if workload == "one long row":
        return [32_768, *(int(n) for n in np.linspace(100, 229, 86))]
    if workload == "even rows":
        return [46_917 // 87] * 87
    if workload == "GAE":
        return [32_768] * 128
    tail = random.permutation(2048) < 20
    return [int(n) for n in np.where(tail, 32_768, random.integers(100, 301, 2048))]


def measure(workload: str) -> dict[str, float]:
    """Return seconds, MiB above what was there before, and the largest tensor's entries."""
    import torch

    torch.set_num_threads(1)
    from rlplug_algos.grpo import GRPO
    from rlplug_algos.ppo import PPO

    from rlplug.interfaces import Denominators, RunInfo
    from rlplug.training.batch_plan import BatchPlan, BatchSizes
    from rlplug.types import Prompt, Sample, StepBatch

    lengths = lengths_of(workload)
    samples = [_sample(Sample, Prompt, row, length) for row, length in enumerate(lengths)]
    is_flat = not hasattr(StepBatch, "padded")
    batch: Any = StepBatch.from_samples(samples) if is_flat else StepBatch.from_samples(samples, 0)  # type: ignore[arg-type]
    del samples
    random = torch.Generator().manual_seed(0)
    run = RunInfo(len(lengths), 8, 32_768)
    if workload == "GAE":
        algorithm: Any = PPO()
        batch = batch.with_tokens(values=torch.randn(sum(lengths), generator=random))
        algorithm.setup(run)
        return _timed(lambda: algorithm.advantages(batch), sum(lengths))
    algorithm = GRPO()
    algorithm.setup(run)
    advantages = torch.randn(len(lengths), generator=random)
    batch = batch.with_advantages(advantages) if is_flat else batch.replace(advantages=advantages)
    plan = BatchPlan(BatchSizes(len(lengths) // 8 or 1, 8 if len(lengths) > 8 else 1), 1, longest=32_768)
    parts = [each.indices for each in plan.passes(range(len(lengths)), lengths)[0]]
    parts = parts if workload == "long tail" else [tuple(range(len(lengths)))]
    largest = [0]

    def passes() -> None:
        for rows in parts:
            largest[0] = max(largest[0], _pass(batch, rows, algorithm, Denominators(sum(lengths), len(lengths))))

    found = _timed(passes, 0)
    return found | {"entries": largest[0]}


def _pass(batch: Any, rows: tuple[int, ...], algorithm: Any, denominators: Any) -> int:
    """Pack rows, and compute their loss and its gradient to logprobs; return the entries of a tensor of the loss."""
    import torch

    from rlplug.models import packing

    if hasattr(packing, "pack_batch"):
        micro: Any = packing.pack_batch(batch.select(list(rows)))
        logprobs = micro.packed.unpack(torch.full((len(micro.packed.slots),), -0.5)).requires_grad_()
    else:
        micro = packing.pack(batch.select(list(rows)))
        logprobs = torch.full((micro.packed.num_trained,), -0.5).requires_grad_()
    given = micro.batch.replace(old_logprobs=logprobs.detach())
    algorithm.loss(given, logprobs, torch.zeros_like(logprobs), denominators).loss.backward()
    return logprobs.numel()


def _timed(action: Callable[[], Any], entries: int) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    action()
    seconds = time.process_time() - began
    return {
        "seconds": seconds,
        "mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "entries": entries,
    }


def _sample(sample: Any, prompt: Any, row: int, length: int) -> Any:
    tokens = np.full(length, 7, np.int32)
    trains = np.arange(length) >= PROMPT
    return sample(
        prompt=prompt(str(row), (7,) * PROMPT, ""),
        group=row // 8,
        token_ids=tokens,
        response_mask=trains,
        rollout_logprobs=np.where(trains, np.float32(-0.5), np.float32(0)),
        completion="",
        finish_reason="stop",
        policy_version=0,
        reward=float(row % 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--repeats", type=int, default=3, help="turns; the least CPU time of each counts")
    parser.add_argument("--measure", choices=WORKLOADS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    sides = {"flat": ROOT} if options.before is None else {"padded": options.before.resolve(), "flat": ROOT}
    print("| workload | side | CPU seconds | MiB more | entries of a tensor of the loss |\n|---|---|---|---|---|")
    for workload in WORKLOADS:
        found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for _ in range(options.repeats):
            for side, checkout in sides.items():
                path = os.pathsep.join(map(str, (checkout, *sorted(checkout.glob("plugins/*/src")))))
                command = [sys.executable, __file__, "--measure", workload]
                done = subprocess.run(
                    command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
                )
                if done.returncode:
                    raise SystemExit(f"{side}, {workload}: {done.stderr[-2000:]}")
                found[side].append(json.loads(done.stdout))
        for side, rows in found.items():
            best = min(rows, key=lambda row: row["seconds"])
            print(f"| {workload} | {side} | {best['seconds']:.3f} | {best['mib']:.0f} | {best['entries']:,.0f} |")


if __name__ == "__main__":
    main()
