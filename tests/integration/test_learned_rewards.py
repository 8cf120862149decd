"""A run with a judge and reward models whose servers fail in many ways: all failures are counted, and none scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from failing_rewards import SAMPLES, STEPS, Failures, RewardedRun, save_reward_model
from judge_server import Reply, by_length, chat, judge_server
from reward_server import NAME, RewardReplies, reward_server

pytestmark = pytest.mark.nightly
NUM_TRIED = 2
"""Requests for scores with which a run tries a reward model's server."""


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
        run = RewardedRun(tmp_path, rewards, {"max_reward_error_share": 0.6})
    counts = {name: run.counts(name) for name in ("judge", "remote")}
    for name, failures in (("judge", judge), ("remote", reward_model)):
        print(name, counts[name], f"failed samples: {run.failed(name)}")
        failures.assert_counted(counts[name])
    assert run.failed("judge") == counts["judge"]["gave_up"] == SAMPLES - judge.sent[""]
    assert run.failed("remote") == counts["remote"]["failed_samples"] == SAMPLES - sum(replies.num_scored[NUM_TRIED:])
    assert counts["judge"]["prompt_tokens"] == 100 * (judge.sent[""] + judge.sent["malformed"])
    assert counts["judge"]["cost"] == pytest.approx((100 + 2 * 10) / 1e6 * (judge.sent[""] + judge.sent["malformed"]))
    run.assert_no_failure_scores()
    for name in ("rewardmodel", "remote"):
        assert len(set(run.numbers(f"reward/{name}"))) > STEPS / 2  # of other completions each
