"""Servers of rewards that fail at random, a reward model of random weights, and what a run says of its rewards."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import ROOT, SMALL
from judge_server import DROP, FAULTS, HANG, Reply
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from rlplug.observability.metrics_log import read_metrics

STEPS = 20
SAMPLES = 16 * STEPS
FAILURES = {
    "rate_limited": (0.1, FAULTS["rate limit"]),
    "server_errors": (0.1, FAULTS["server error"]),
    "failed_connections": (0.05, DROP),
}
"""How often each failure comes, by the name under which a reward counts it."""


class Failures:
    """Fails at random; ``sent`` has what it did.

    Args:
        malformed: An answer that is not what was asked for, final for a reward.
        num_spared: Requests before the first failure: those of the start of a run, where a failure is final.
        timeouts: How often no answer comes; each costs the deadline of a request.
    """

    def __init__(self, malformed: Reply, num_spared: int = 0, timeouts: float = 0.02) -> None:
        self.num_spared = num_spared
        self.kinds = FAILURES | {"timeouts": (timeouts, HANG), "malformed": (0.05, malformed)}
        self.random, self.sent, self.lock = random.Random(0), Counter(), threading.Lock()

    def draw(self) -> Reply | None:
        shares = [share for share, _ in self.kinds.values()]
        with self.lock:
            if self.num_spared:
                self.num_spared -= 1
                return None
            (kind,) = self.random.choices([*self.kinds, ""], [*shares, 1 - sum(shares)])
            self.sent[kind] += 1
        return self.kinds[kind][1] if kind else None

    def assert_counted(self, counts: Mapping[str, float]) -> None:
        """Check that a run counted each request and failure, under its name, and nothing more."""
        assert {kind: counts[kind] for kind in self.kinds} == {kind: self.sent[kind] for kind in self.kinds}
        assert all(self.sent[kind] for kind in self.kinds)
        assert counts["requests"] == sum(self.sent.values())
        assert counts["gave_up"] == counts["requests"] - counts["retries"] - self.sent[""] > 0


def save_reward_model(folder: Path, vocabulary: int = 32, hidden_size: int = 16) -> int:
    """Write a classifier of random weights with the tokenizer of ``tests/model``; return its number of weights."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tests/model")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}={% endfor %}{{ eos_token }}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    network = LlamaForSequenceClassification(
        LlamaConfig(vocab_size=vocabulary, hidden_size=hidden_size, num_labels=1, **sizes)
    )
    network.save_pretrained(folder)
    return sum(parameter.numel() for parameter in network.parameters())


class RewardedRun:
    """A run of 20 steps of 16 completions in a process of its own, which has ended well.

    Args:
        folder: An empty folder for its files.
        rewards: ``model.rewards``.
        limits: ``model.limits``.
        arguments: More of its command line.
        variables: More of its environment.
    """

    def __init__(
        self,
        folder: Path,
        rewards: list[dict[str, Any]],
        limits: Mapping[str, float],
        arguments: tuple[str, ...] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        settings = {"model": {"rewards": rewards, "num_steps": STEPS, "limits": dict(limits)}}
        (folder / "run.yaml").write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "rlplug", *SMALL, "-c", folder / "run.yaml"]
        run = subprocess.run(
            [*command, "--run.dir", folder / "run", "--run.samples_per_step", "16", *arguments],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}, capture_output=True, text=True,
            timeout=1200,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
        self.output = run.stdout + run.stderr
        self.folder = folder / "run/001"

    @cached_property
    def steps(self) -> list[dict[str, float]]:
        """Metrics of each step."""
        rows = [row for row in read_metrics(self.folder / "metrics.jsonl") if "reward/mean" in row]
        assert len(rows) == STEPS
        return rows

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Lines of ``samples.jsonl``, which has all samples."""
        lines = self._lines("samples.jsonl")
        assert len(lines) == SAMPLES
        return lines

    @cached_property
    def errors(self) -> list[dict[str, Any]]:
        """Lines of ``reward_errors.jsonl``."""
        return self._lines("reward_errors.jsonl")

    def counts(self, name: str) -> Counter[str]:
        """Return the sums over the run of what a reward counted."""
        prefix, total = f"reward_counts/{name}/", Counter()
        for row in self.steps:
            total.update({key.removeprefix(prefix): row[key] for key in row if key.startswith(prefix)})
        return total

    def failed(self, name: str) -> int:
        """Return the number of samples that a reward did not score."""
        return sum(isinstance(each["rewards"][name], dict) for each in self.errors)

    def numbers(self, metric: str) -> list[float]:
        """Return a metric of each step."""
        return [row[metric] for row in self.steps]

    def assert_no_failure_scores(self) -> None:
        """Check that each sample with a failed reward has an error and no reward, and that the others have one."""
        failed = [each for each in self.samples if any(isinstance(value, dict) for value in each["rewards"].values())]
        assert len(failed) == len(self.errors) > 0
        assert all(each["reward"] is None for each in [*failed, *self.errors])
        scored = [each["reward"] for each in self.samples if each not in failed]
        assert all(reward is not None and reward != 0 for reward in scored)
        assert sum(self.numbers("reward/error_share")) * SAMPLES / STEPS == pytest.approx(len(self.errors))

    def _lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]
