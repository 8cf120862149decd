"""A run with a judge and reward models whose servers fail in many ways: all failures are counted, and none scores."""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from command_line import ROOT, SMALL
from judge_server import DROP, FAULTS, HANG, Reply, by_length, chat, judge_server
from reward_server import NAME, RewardReplies, reward_server
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

pytestmark = pytest.mark.nightly
STEPS = 20
SAMPLES = 16 * STEPS
NUM_TRIED = 2
"""Requests for scores with which a run tries a reward model's server."""
FAILURES = {
    "rate_limited": (0.1, FAULTS["rate limit"]),
    "server_errors": (0.1, FAULTS["server error"]),
    "failed_connections": (0.05, DROP),
    "timeouts": (0.02, HANG),
}
"""How often each failure comes, by the name under which a reward counts it."""


class Failures:
    """Fails at random; ``sent`` has what it did.

    Args:
        malformed: An answer that is not what was asked for, final for a reward.
        num_spared: Requests before the first failure: those of the start of a run, where a failure is final.
    """

    def __init__(self, malformed: Reply, num_spared: int = 0) -> None:
        self.num_spared = num_spared
        self.kinds = FAILURES | {"malformed": (0.05, malformed)}
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


def save_reward_model(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tests/model")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}={% endfor %}{{ eos_token }}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForSequenceClassification(LlamaConfig(vocab_size=32, num_labels=1, **sizes)).save_pretrained(folder)


def test_every_failure_of_twenty_steps_is_counted(tmp_path: Path) -> None:
    save_reward_model(tmp_path / "reward-model")
    (tmp_path / "judge.jinja").write_text("{{ prompt }} {{ completion }}")
    judge = Failures(Reply(chat("I cannot say.")))
    reward_model = Failures(Reply(json.dumps({"model": NAME, "data": []}).encode()), NUM_TRIED)
    replies = RewardReplies()
    replies.fail = reward_model.draw
    with (
        judge_server(lambda body: judge.draw() or by_length(body)) as server,
        reward_server(replies) as reward_model_server,
    ):
        limits = {"request_deadline_s": 5.0, "max_retries": 2, "first_backoff_s": 0.01}
        endpoint = {"url": server.url, "model": "judge", "limits": limits, "prices": {"prompt": 1.0, "completion": 2.0}}
        remote = {"url": reward_model_server.url.removesuffix("/v1"), "model": NAME, "limits": limits}
        path = str(tmp_path / "reward-model")
        rewards = [
            {"class_path": "Judge", "init_args": {"endpoint": endpoint, "template": str(tmp_path / "judge.jinja")}},
            {"class_path": "RewardModel", "init_args": {"path": path, "weight": 0.1}},
            {
                "class_path": "RemoteRewardModel",
                "init_args": {"path": path, "endpoint": remote, "weight": 0.1, "max_tokens": 32, "name": "remote"},
            },
        ]
        settings = {"model": {"rewards": rewards, "num_steps": STEPS, "limits": {"max_reward_error_share": 0.6}}}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "rlplug", *SMALL, "-c", str(tmp_path / "run.yaml")]
        run = subprocess.run(
            [*command, "--run.dir", str(tmp_path / "run")],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1200,
        )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    with open(tmp_path / "run/001/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["reward/mean"]]
    assert len(rows) == STEPS
    errors = [json.loads(line) for line in (tmp_path / "run/001/reward_errors.jsonl").read_text().splitlines()]
    counts = {name: counts_of(name, rows) for name in ("judge", "remote")}
    failed = {name: sum(isinstance(each["rewards"][name], dict) for each in errors) for name in counts}
    for name, sent in (("judge", judge.sent), ("remote", reward_model.sent)):
        print(name, counts[name], f"failed samples: {failed[name]}")
        kinds = judge.kinds
        assert {kind: counts[name][kind] for kind in kinds} == {kind: sent[kind] for kind in kinds}
        assert all(sent[kind] for kind in kinds)
        assert counts[name]["requests"] == sum(sent.values())
        assert counts[name]["gave_up"] == counts[name]["requests"] - counts[name]["retries"] - sent[""] > 0
    assert failed["judge"] == counts["judge"]["gave_up"] == SAMPLES - judge.sent[""]
    assert failed["remote"] == counts["remote"]["failed_samples"] == SAMPLES - sum(replies.num_scored[NUM_TRIED:])
    assert counts["judge"]["prompt_tokens"] == 100 * (judge.sent[""] + judge.sent["malformed"])
    assert counts["judge"]["cost"] == pytest.approx((100 + 2 * 10) / 1e6 * (judge.sent[""] + judge.sent["malformed"]))
    assert sum(float(row["reward/error_share"]) * 16 for row in rows) == pytest.approx(len(errors))
    assert all(float(row["reward/min"]) != 0 for row in rows)
    for name in ("rewardmodel", "remote"):
        assert len({float(row[f"reward/{name}"]) for row in rows}) > STEPS / 2  # of other completions each


def counts_of(name: str, rows: list[dict[str, str]]) -> Counter[str]:
    """Return the sums over a run of what a reward counted."""
    prefix, total = f"reward_counts/{name}/", Counter()
    for row in rows:
        total.update({key.removeprefix(prefix): float(row[key] or 0) for key in row if key.startswith(prefix)})
    return total
