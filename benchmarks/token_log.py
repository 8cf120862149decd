"""What the token log costs: bytes a token, and milliseconds a step of a real run.

``python benchmarks/token_log.py steps -- fit --config configs/quickstart.yaml ...`` runs a command line and prints the
time that it spent on the token log in each step beside ``time/step``. ``... size TOKENIZER`` encodes made-up steps of
8 completions with a tokenizer's folder.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rlplug_watch.page.token_records import all_records, read_record
from rlplug_watch.token_log import step_tokens as log
from rlplug_watch.token_log.capture import TokenCapture
from rlplug_watch.token_log.files import TokenLogWriter
from rlplug_watch.token_log.log import FileTokenLog
from rlplug_watch.token_log.pieces import TokenPieces
from transformers import AutoTokenizer

from rlplug.observability.metrics_log import read_metrics
from rlplug.recording import run_folder


def timed(owner: type, name: str, spent: dict[str, list[float]]) -> None:
    """Let a method note how many seconds each call took."""
    original: Callable[..., Any] = getattr(owner, name)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(*arguments, **keywords)
        finally:
            spent[name].append(time.perf_counter() - began)

    setattr(owner, name, wrapped)


def steps(arguments: list[str]) -> None:
    """Run a command line and print what its token log cost."""
    from rlplug.cli.main import main

    spent: dict[str, list[float]] = defaultdict(list)
    for owner, name in ((TokenCapture, "add"), (FileTokenLog, "write")):
        timed(owner, name, spent)
    folders: list[Path] = []
    accept = run_folder.RunFolder._accept
    run_folder.RunFolder._accept = lambda self, *rest: (folders.append(self.path), accept(self, *rest))[1]  # type: ignore
    sys.argv = ["rlplug", *arguments]
    assert main() == 0
    folder = folders[0]
    seconds = [row["time/step"] for row in read_metrics(folder / "metrics.jsonl") if "time/step" in row]
    records = [read_record(record) for record in all_records(folder / "tokens")]
    num_tokens = sum(len(tokens.columns["flags"]) for tokens in records)
    num_bytes = sum(path.stat().st_size for path in (folder / "tokens").iterdir())
    writes, adds = spent["_write_tokens"], sum(spent["add"]) / len(records)
    step, write = statistics.median(seconds), statistics.median(writes)
    print(f"{len(records)} steps of {step * 1e3:.1f} ms (median), {num_tokens / len(records):.0f} tokens a step")
    print(f"gather and write: {write * 1e3:.2f} ms (median), {max(writes) * 1e3:.2f} ms at most")
    print(f"note passes: {adds * 1e3:.3f} ms a step; together {100 * (write + adds) / step:.3f}% of a step")
    print(f"{num_bytes / num_tokens:.1f} bytes a token, {num_bytes / len(records):.0f} bytes a step")


def size(folder: str) -> None:
    """Print bytes and milliseconds for random tokens and plausible numbers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    random = np.random.default_rng(0)
    pieces = TokenPieces(tokenizer)
    print("| completions | tokens each | bytes a token | compressed | encode and append, ms | read, ms |")
    print("|---:|---:|---:|---:|---:|---:|")
    for length in (64, 1024, 8192):
        num_tokens = 8 * length
        ids = np.minimum(random.zipf(1.3, num_tokens), len(tokenizer) - 1).astype(np.int32)
        logprobs = -random.exponential(0.8, num_tokens).astype(np.float32)
        columns = {
            "token_ids": ids,
            "flags": np.full(num_tokens, 3, np.uint8),
            "policy_versions": np.full(num_tokens, 4, np.int32),
            "advantages": np.repeat(random.normal(size=8), length).astype(np.float32),
            "engine_logprobs": logprobs + random.normal(0, 0.01, num_tokens),
            "logprobs": logprobs,
            "mismatch": random.normal(0, 0.01, num_tokens),
            "log_ratio": random.normal(0, 0.05, num_tokens),
            "entropy": random.exponential(0.8, num_tokens),
            "clipped": (random.random(num_tokens) < 0.01).astype(np.int8),
        }
        rows = np.array([(0, index, 100, length) for index in range(8)], log.ROW)
        with tempfile.TemporaryDirectory() as parent:
            writer, spent = TokenLogWriter(Path(parent) / "tokens", 1 << 30), []
            for step in range(1, 21):
                began = time.perf_counter()
                writer.append(log.StepTokens(step, rows, columns, pieces.of(ids.tolist())))
                spent.append(time.perf_counter() - began)
            records = list(all_records(Path(parent) / "tokens"))
            began = time.perf_counter()
            read_record(records[-1])
            read = time.perf_counter() - began
        raw, stored = records[0].num_bytes / num_tokens, records[0].size / num_tokens
        print(
            f"| 8 | {length:,} | {raw:.1f} | {stored:.1f} | {statistics.median(spent) * 1e3:.2f} | {read * 1e3:.2f} |"
        )


if __name__ == "__main__":
    if sys.argv[1] == "size":
        size(sys.argv[2])
    else:
        steps(sys.argv[3:])
