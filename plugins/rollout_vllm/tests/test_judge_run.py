"""A run of 20 steps with a judge, SmolLM2 behind vLLM's own server, and faults between; on a GPU if there is one.

``SMOLLM2=/path python -m pytest -m nightly -s plugins/rollout_vllm/tests/test_judge_run.py`` prints what it measured;
without ``SMOLLM2`` the model is the one in ``models``. On a GPU, the policy, the server and a reward model share it.
"""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_rewards import SAMPLES, STEPS, Failures, RewardedRun, save_reward_model
from judge_server import Reply, chat, judge_server
from vllm_api import KEY, SMOLLM2, vllm_api

from rlplug.types import GIB

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
ON_GPU = torch.cuda.is_available()
SERVER = ["--max-model-len", "512", "--max-num-seqs", "16", "--enforce-eager"]
# a size, since vLLM would otherwise measure what is free while others on the GPU come and go
SERVER += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", "2G"] if ON_GPU else ["--dtype", "float32"]
REQUEST_DEADLINE_S = 5.0 if ON_GPU else 20.0
REWARD_DEADLINE_S = max(4 * REQUEST_DEADLINE_S, 30.0)
"""A reward model's own deadline is 28 s."""
SAMPLING = {"temperature": 1.0, "max_tokens": 4, "structured_outputs": {"choice": list("123456789")}}
"""vLLM enforces a digit; no verdict is a 0, so that a 0 would be a failure."""


class Relay:
    """Passes requests on to vLLM's server, and keeps its answers and how long they took."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.answers: list[dict[str, Any]] = []
        self.seconds: list[float] = []

    def __call__(self, body: dict[str, Any]) -> Reply:
        began = time.monotonic()
        answer = self.ask("chat/completions", body)
        self.seconds.append(time.monotonic() - began)
        self.answers.append(json.loads(answer))
        return Reply(answer)

    def ask(self, route: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.address}/v1/{route}", data, headers)) as answer:
            return answer.read()

    def warm_up(self) -> None:
        """Ask as the judge will, as often at once as a step does, and forget the answers: the first ones are slow."""
        body = {"model": "smollm2", "messages": [{"role": "user", "content": "Grade 2."}], **SAMPLING}
        with ThreadPoolExecutor(SAMPLES // STEPS) as threads:
            list(threads.map(self, [body] * (SAMPLES // STEPS)))
        self.answers.clear()
        self.seconds.clear()

    def verdicts(self) -> Counter[float]:
        return Counter(float(answer["choices"][0]["message"]["content"]) for answer in self.answers)


def test_failures_between_a_run_and_its_real_judge_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = save_reward_model(tmp_path / "reward-model", vocabulary=1 << 17, hidden_size=256)
    (tmp_path / "judge.jinja").write_text("Grade {{ prompt }} {{ completion }} from 1 to 9.")
    failures = Failures(Reply(chat("I cannot say.")), timeouts=0.01)
    began = time.monotonic()
    with vllm_api(SMOLLM2, "smollm2", tmp_path, *SERVER) as address:
        relay = Relay(address)
        with judge_server(lambda body: failures.draw() or relay(body)) as proxy:
            relay.warm_up()
            proxy.needs_key, proxy.models = KEY, relay.ask("models")
            start_s, began = time.monotonic() - began, time.monotonic()
            run = RewardedRun(
                tmp_path,
                rewards(proxy.url, tmp_path),
                {"max_reward_error_share": 0.6, "reward_deadline_s": REWARD_DEADLINE_S},
                ("--trainer.accelerator", "gpu" if ON_GPU else "cpu", "--trainer.devices", "1"),
                {"JUDGE_KEY": KEY},
            )
            run_s = time.monotonic() - began
    with capsys.disabled():
        print(table(run, failures, {"start of the server, s": start_s, "run, s": run_s}, relay))
    assert max(relay.seconds) < REQUEST_DEADLINE_S, "the server itself was too slow: this is no failure of a run"
    assert set(proxy.keys) == {f"Bearer {KEY}"}
    assert KEY not in run.output
    counts = run.counts("judge")
    failures.assert_counted(counts)
    assert run.failed("judge") == counts["gave_up"] == SAMPLES - len(relay.answers)
    run.assert_no_failure_scores()
    scores = Counter(each["rewards"]["judge"] for each in run.samples if each["reward"] is not None)
    assert scores == relay.verdicts()
    assert len(scores) > 1
    used = [answer["usage"] for answer in relay.answers]
    for name, of_malformed in (("prompt_tokens", 100), ("completion_tokens", 10)):
        assert counts[name] == sum(usage[name] for usage in used) + of_malformed * failures.sent["malformed"]
    assert len(set(run.numbers("reward/rewardmodel"))) > STEPS / 2  # of other completions each
    if ON_GPU:
        scoring, after = run.numbers("memory/rewards"), run.numbers("memory/filter")
        loaded = min(one - other for one, other in zip(scoring, after, strict=True))
        assert loaded > 0.9 * weights * 2 / GIB, "the reward model came to the GPU and left it, in each step"


def rewards(url: str, folder: Path) -> list[dict[str, Any]]:
    limits = {"request_deadline_s": REQUEST_DEADLINE_S, "deadline_s": 4 * REQUEST_DEADLINE_S}
    endpoint = {
        "url": url,
        "model": "smollm2",
        "api_key_env": "JUDGE_KEY",
        "sampling": SAMPLING,
        "limits": limits | {"max_retries": 2, "first_backoff_s": 0.01},
    }
    judge = {"endpoint": endpoint, "template": str(folder / "judge.jinja"), "answer": "plain"}
    return [
        {"class_path": "Judge", "init_args": judge | {"minimum": 1, "maximum": 9}},
        {"class_path": "RewardModel", "init_args": {"path": str(folder / "reward-model"), "weight": 0.1}},
    ]


def table(run: RewardedRun, failures: Failures, figures: dict[str, float], relay: Relay) -> str:
    """Return what was sent, what was counted, and what it took, as a table."""
    counts = run.counts("judge")
    lines = ["", "| | sent | counted |", "|---|---:|---:|"]
    lines += [f"| `{kind}` | {failures.sent[kind]} | {counts[kind]:.0f} |" for kind in failures.kinds]
    lines.append(f"| `requests` | {sum(failures.sent.values())} | {counts['requests']:.0f} |")
    figures = figures | {f"judge: {name}": counts[name] for name in ("retries", "gave_up", "prompt_tokens")}
    figures["samples without a judge's score, lines of reward_errors.jsonl"] = run.failed("judge")
    figures |= {"median answer of the server, s": statistics.median(relay.seconds)}
    figures |= {"slowest answer of the server, s": max(relay.seconds)}
    for phase in ("rewards", "step"):
        figures[f"median time/{phase}, s"] = statistics.median(run.numbers(f"time/{phase}"))
        figures[f"largest time/{phase}, s"] = max(run.numbers(f"time/{phase}"))
    kind = "peak of" if ON_GPU else "resident at the end of"
    for phase in ("rollout", "rewards", "filter", "update"):
        figures[f"{kind} {phase} (memory/{phase}), MiB"] = 1024 * max(run.numbers(f"memory/{phase}"))
    lines += ["", f"| on {torch.cuda.get_device_name() if ON_GPU else 'the CPU'} | |", "|---|---:|"]
    return "\n".join([*lines, *(f"| {name} | {value:.4g} |" for name, value in figures.items()), ""])
