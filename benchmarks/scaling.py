"""Says what a step costs the host at sizes that no machine here has: by measured parts, the real plan and arithmetic.

    python benchmarks/scaling.py --ranks 1 8 64 1024 --tokens 1 8 40 100

Measured here, on one core: seconds of a rank's own work a token (arrays of its samples; rows taken out to be sent, and
micro-batches made of what came), of the tables that every rank has a completion (rewards and lengths, sorting, metrics)
and of the batch plan for all completions on all ranks. The rest is arithmetic, with the assumptions that it prints:
bytes of a token in the exchange, a completion's mean length, and the bandwidth of a rank's link.

A row is a step of ``tokens`` million tokens on ``ranks`` ranks. Its columns are of one rank, between the engine's last
answer and the first micro-batch: host seconds by cause, GiB of its own tokens, and seconds on the link. Decoding text
for rewards and logs is beside them, since whoever needs no text can do without.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlplug.training.batch_plan import BatchPlan, BatchSizes
from rlplug.training.samples.metrics import rollout_metrics, sample_table
from rlplug.training.step_rows import ROW, _exchanged
from rlplug.types import Prompt, Rollout, Sample, StepBatch

MEAN_TOKENS = 8192
"""Tokens of a completion, prompt included."""
GROUP_SIZE = 16
BYTES = 4 + 1 + 4 + 4
"""Of a token in the exchange: token id, whether it trains, the engine's logprob, policy version."""
DECODE_S = 0.7e-6
"""Seconds to decode a token, measured by ``benchmarks/host_cost.py`` on 2026-11-23: 5.6 s for 8 million."""
GIB = 1 << 30


def seconds_of(function: Callable[[], Any], repeats: int = 3) -> float:
    """Return the CPU seconds of the fastest of some calls."""
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        function()
        taken.append(time.process_time() - began)
    return min(taken)


def samples_of(num: int, length: int) -> list[Sample]:
    """Return samples of ``length`` tokens each, in groups."""
    tokens, mask = np.ones(length, np.int32), np.arange(length) >= 100
    prompt = Prompt("p", (1,) * 100, "")
    logprobs = -np.ones(length, np.float32)
    return [
        Sample(prompt, index // GROUP_SIZE, tokens, mask, logprobs, "", "stop", 1, rewards={"r": 1.0})
        for index in range(num)
    ]


def seconds_a_token(num: int = 256) -> float:
    """Return a rank's seconds for each of its own tokens."""
    samples = samples_of(num, MEAN_TOKENS)
    batch = StepBatch.from_samples(samples)
    alone: Any = SimpleNamespace(exchange_arrays=lambda parts, lengths: np.concatenate(parts))
    halves = [np.arange(num // 2), np.arange(num // 2, num)]
    work = [
        lambda: StepBatch.from_samples(samples),
        lambda: _exchanged(batch, halves, [batch.lengths[rows] for rows in halves], alone),
        lambda: [batch.select(range(start, start + 4)) for start in range(0, num, 4)],
    ]
    return sum(seconds_of(each) for each in work) / (num * MEAN_TOKENS)


def seconds_of_tables(num: int) -> float:
    """Return a rank's seconds for tables of ``num`` completions of all ranks, sorted, and their metrics."""
    table = sample_table(Rollout(tuple(samples_of(1024, 128))), ["r"], lambda array: array)
    repeated = np.tile(table, -(-num // 1024))[:num]
    repeated["group"] = np.arange(num) // GROUP_SIZE
    rows = np.zeros(num, ROW)
    rows["group"], rows["index"] = repeated["group"], np.arange(num)

    def sort() -> None:
        rows[np.lexsort((rows["index"], rows["group"]))]["length"].tolist()

    return seconds_of(lambda: rollout_metrics(repeated, ["r"]), 1) + seconds_of(sort, 1)


def seconds_of_plan(num: int, ranks: int) -> float:
    """Return the seconds of the plan for ``num`` completions on ``ranks`` ranks, which each of them computes."""
    generator = np.random.default_rng(0)
    lengths = np.minimum(generator.lognormal(0, 0.7, num) * MEAN_TOKENS / 1.28, 4 * MEAN_TOKENS).astype(int).tolist()
    groups = -(-num // GROUP_SIZE // ranks) * ranks
    sizes = BatchSizes(groups, GROUP_SIZE, max_tokens_per_gpu=4 * MEAN_TOKENS)
    plan = BatchPlan(sizes, ranks, longest=4 * MEAN_TOKENS, quadratic_cost=3.5e-5)
    return seconds_of(lambda: plan.passes(range(num), lengths), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 1024])
    parser.add_argument("--tokens", type=float, nargs="+", default=[1, 8, 40, 100], help="of a step, in millions")
    parser.add_argument("--link", type=float, default=10.0, help="GB/s that a rank's link sends and receives")
    options = parser.parse_args()
    a_token = seconds_a_token()
    print(f"measured: {a_token * 1e9:.1f} ns of a rank's own work a token; {BYTES} bytes a token in the exchange;")
    print(f"completions of {MEAN_TOKENS} tokens; links of {options.link:g} GB/s\n")
    names = "million tokens | ranks | completions | own tokens s | tables s | plan s | link s | all s | GiB | decode s"
    print(f"| {names} |")
    print("|---:" * 10 + "|")
    for million in options.tokens:
        num = max(1, round(million * 1e6 / MEAN_TOKENS))
        tables = seconds_of_tables(num)
        for ranks in options.ranks:
            if ranks > num:
                continue
            own = million * 1e6 / ranks
            plan, link = seconds_of_plan(num, ranks), own * BYTES / (options.link * 1e9)
            total = own * a_token + tables + plan + link
            print(
                f"| {million:g} | {ranks} | {num} | {own * a_token:.3f} | {tables:.3f} | {plan:.3f} | {link:.4f} | "
                f"{total:.3f} | {own * 2 * BYTES / GIB:.3f} | {own * DECODE_S:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
