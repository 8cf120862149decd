"""``rlplug compare``: verdicts follow the noise of the steps, and CI gets an exit status."""

from __future__ import annotations

import json
import random

import pytest
from rlplug_watch import comparison
from rlplug_watch.commands.compare import compare_command
from rlplug_watch.comparison import compare_runs, interval_of_difference

from rlplug.errors import ConfigError

CONFIG = """
seed_everything: {seed}
model:
  sampling:
    temperature: {temperature}
  api_key: sk-{seed}12345678901234567890
"""


@pytest.fixture
def write_run(tmp_path):
    def write(name, reward=0.5, seconds=1.0, memory=10.0, steps=40, seed=1, temperature=1.0, margin=0.02):
        folder, rng = tmp_path / name, random.Random(seed)
        folder.mkdir()
        rows = [
            {
                "step": step,
                "reward/mean": reward + rng.gauss(0, 0.05),
                "time/step": seconds * (5 if step == 1 else rng.uniform(0.95, 1.05)),
                "memory/update": memory,
                "validate/reward_mean": reward if step % 10 == 0 else None,
                "validate/reward_low": reward - margin if step % 10 == 0 else None,
                "validate/reward_high": reward + margin if step % 10 == 0 else None,
                "loss": float("nan") if step == 3 else 0.1,
            }
            for step in range(1, steps + 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "config.yaml").write_text(CONFIG.format(seed=seed, temperature=temperature))
        (folder / "run.json").write_text(json.dumps({"status": "finished", "versions": {"torch": f"2.{seed}"}}))
        return folder

    return write


def verdicts(*folders, **options):
    return {row.name: row.verdict for row in compare_runs(folders, **options).rows}


def test_noise_is_no_change_and_a_change_has_a_direction(write_run):
    """It catches an interval that is not of the difference, and a direction that is turned round."""
    first, same = write_run("a", seed=1), write_run("same", seed=2)
    other = write_run("other", reward=0.7, seconds=1.5, memory=8.0, seed=3)
    assert set(verdicts(first, same).values()) == {"same"}
    expected = {"reward/mean": "better", "validate/reward_mean": "better", "time/step": "worse", "memory": "better"}
    assert verdicts(first, other) == {"loss": "same", **expected}
    turned = {"better": "worse", "worse": "better"}
    assert verdicts(other, first) == {"loss": "same"} | {name: turned[each] for name, each in expected.items()}
    assert verdicts(first, other, tolerance=0.9)["time/step"] == "same"


def test_it_says_what_was_set_otherwise_and_no_secret(write_run, capsys):
    folders = [str(write_run("a", seed=1)), str(write_run("b", seed=2, temperature=0.7, seconds=2.0))]
    assert compare_command(folders) == 1
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("temperature", "0.7", "torch", "2.2", "worse"))
    assert "sk-" not in shown
    assert compare_command([*folders, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["is_worse"]
    assert [each["name"] for each in found["versions"]] == ["torch"]
    assert compare_command([folders[0], folders[0]]) == 0


def test_few_steps_have_no_verdict_and_none_in_common_are_refused(write_run):
    short = write_run("short", steps=8)
    assert verdicts(short, write_run("other", steps=8, reward=0.9, seed=2))["reward/mean"] == ""
    with pytest.raises(ConfigError, match="no step in common"):
        compare_runs((short, write_run("empty", steps=0)))
    with pytest.raises(ConfigError, match="--metrics policy/entropy: not both runs have it in steps 5 to 8"):
        compare_runs((short, short), ["policy/entropy"])
    with pytest.raises(ConfigError, match="is not a folder"):
        compare_runs((short, short / "none"))


def test_intervals_hold_the_true_difference_of_steps_that_follow_each_other(monkeypatch):
    """Of autoregressive noise with no difference, about 95% of intervals hold 0; drawn step by step only 80% would."""
    monkeypatch.setattr(comparison, "RESAMPLES", 200)
    held = 0
    for seed in range(200):
        rng, values = random.Random(seed), [[0.0], [0.0]]
        for series in values:
            for _ in range(400):
                series.append(0.4 * series[-1] + rng.gauss(0, 1))
        low, high = interval_of_difference(*values)
        held += low <= 0 <= high
    assert held >= 174
