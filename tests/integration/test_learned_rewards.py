"""A run with a reward model, and a judge whose server fails in many ways: all failures are counted, and none scores."""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from command_line import ROOT, SMALL
from judge_server import DROP, FAULTS, HANG, Reply, by_length, chat, judge_server
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

pytestmark = pytest.mark.nightly
STEPS = 20
SAMPLES = 16 * STEPS
SHARES = {
    "rate_limited": (0.1, FAULTS["rate limit"]),
    "server_errors": (0.1, FAULTS["server error"]),
    "failed_connections": (0.05, DROP),
    "malformed": (0.05, Reply(chat("I cannot say."))),
    "timeouts": (0.02, HANG),
}
"""How often each failure comes, by the name under which a judge counts it."""


class FailingJudge:
    """Scores by length, and fails at random; ``sent`` has what it did."""

    def __init__(self) -> None:
        self.random, self.sent = random.Random(0), Counter()

    def __call__(self, body: dict) -> Reply:
        (kind,) = self.random.choices([*SHARES, ""], [*(share for share, _ in SHARES.values()), 0.68])
        self.sent[kind] += 1
        return SHARES[kind][1] if kind else by_length(body)


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
    judge = FailingJudge()
    with judge_server(judge) as server:
        limits = {"request_deadline_s": 5.0, "max_retries": 2, "first_backoff_s": 0.01}
        endpoint = {"url": server.url, "model": "judge", "limits": limits, "prices": {"prompt": 1.0, "completion": 2.0}}
        rewards = [
            {"class_path": "Judge", "init_args": {"endpoint": endpoint, "template": str(tmp_path / "judge.jinja")}},
            {"class_path": "RewardModel", "init_args": {"path": str(tmp_path / "reward-model"), "weight": 0.1}},
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

    def total(name: str) -> float:
        return sum(float(row.get(f"reward_counts/judge/{name}") or 0) for row in rows)

    assert {kind: total(kind) for kind in SHARES} == {kind: judge.sent[kind] for kind in SHARES}
    assert all(judge.sent[kind] for kind in SHARES)
    assert total("requests") == sum(judge.sent.values()) == SAMPLES + total("retries")
    assert total("prompt_tokens") == 100 * (judge.sent[""] + judge.sent["malformed"])
    assert total("cost") == pytest.approx((100 + 2 * 10) / 1e6 * (judge.sent[""] + judge.sent["malformed"]))
    errors = [json.loads(line) for line in (tmp_path / "run/001/reward_errors.jsonl").read_text().splitlines()]
    assert len(errors) == total("gave_up") == SAMPLES - judge.sent[""]
    assert sum(float(row["reward/error_share"]) * 16 for row in rows) == pytest.approx(len(errors))
    assert all("error" in each["rewards"]["judge"] for each in errors)
    assert all(float(row["reward/min"]) != 0 for row in rows)
    assert len({float(row["reward/rewardmodel"]) for row in rows}) > STEPS / 2  # of other completions each
    print({name: total(name) for name in ("requests", "retries", "gave_up", *SHARES)})
