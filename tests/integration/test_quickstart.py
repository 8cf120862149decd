"""``make quickstart`` teaches a policy, and leaves a folder that others can open.

On a push, its first steps; the whole quickstart runs every night.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import distributions
from pathlib import Path
from sysconfig import get_paths

import pytest
from command_line import ROOT, samples
from forked import run_forked
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlplug.observability.metrics_log import read_metrics

LEARNT = {45: 0.15, 160: 0.9}
"""Least mean reward of the last five steps, and of the last validation, after so many."""


@pytest.fixture(scope="module", params=samples(LEARNT, 45))
def num_steps(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def quickstart(num_steps: int, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the quickstart and return its folder and what it printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    command = [sys.executable, "-m", "rlplug", "fit", "--config", "configs/quickstart.yaml", "--run.dir", str(folder)]
    command += ["--model.num_steps", str(num_steps)]
    done = run_forked(command, cwd=ROOT, timeout=840, check=True)
    return folder / "001", done.stdout


def test_the_policy_learns(quickstart: tuple[Path, str], num_steps: int) -> None:
    rows = read_metrics(quickstart[0] / "metrics.jsonl")
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    validation = [row["validate/reward_mean"] for row in rows if "validate/reward_mean" in row]

    assert rewards[0] < 0.15
    assert sum(rewards[-5:]) / 5 > LEARNT[num_steps]
    assert validation[0] < 0.15
    assert validation[-1] > LEARNT[num_steps]  # numbers that it has never seen
    assert max(row["mismatch/mean"] for row in rows if "mismatch/mean" in row) < 1e-5


def test_the_folder_is_whole(quickstart: tuple[Path, str], num_steps: int) -> None:
    folder = quickstart[0]
    record = json.loads((folder / "run.json").read_text())

    assert record["status"] == "finished"
    assert list(record["start"]["seconds"])[-4:] == ["packing check", "engine start", "first validation", "first step"]
    assert {"torch", "lightning", "transformers", "rlplug", "rlplug-algos"} <= record["versions"].keys()
    installed = distributions(path=[get_paths()["purelib"]])  # without what setuptools brings once it is imported
    assert {each.name: each.version for each in installed}.items() <= record["versions"].items()
    assert "algos" in {plugin["name"] for plugin in record["plugins"]}
    assert (folder / "config.yaml").read_text().count("class_path: rlplug_algos.GRPO") == 1
    assert "<html" in (folder / "report.html").read_text()
    assert len((folder / "samples.jsonl").read_text().splitlines()) > num_steps


def test_the_policy_opens_with_transformers_alone(quickstart: tuple[Path, str], num_steps: int) -> None:
    policy = quickstart[0] / "policy"
    tokenizer, model = AutoTokenizer.from_pretrained(policy), AutoModelForCausalLM.from_pretrained(policy)

    inputs = tokenizer(["312>", "940>", "187>"], return_tensors="pt", return_token_type_ids=False)
    completions = model.generate(**inputs, max_new_tokens=4, do_sample=False)[:, 4:]
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    digits = zip("".join(text.ljust(3)[:3] for text in texts), "123049178", strict=True)

    assert sum(digit == answer for digit, answer in digits) > 9 * LEARNT[num_steps] - 1


def test_the_end_says_what_came_out_and_what_to_do(quickstart: tuple[Path, str], num_steps: int) -> None:
    folder, output = quickstart

    assert f"GRPO trains examples/quickstart/model (float32) on cpu: {num_steps} steps of 64 prompts" in output
    assert "HFRollout generates, digits_in_place scores; 900 prompts of data.train" in output
    assert "batch plan" not in output  # which --verbose prints
    assert "\nstarted in " in output
    assert "training reward 0.0" in output
    assert re.search(
        r"held-out reward 0\.0\d\d \(-?0\.\d+ to 0\.\d+\) -> [01]\.\d+ \(0\.\d+ to [01]\.\d+\): the policy learned",
        output.splitlines()[-1],
    )
    assert f"report: {folder / 'report.html'}" in output
    assert "next: load the policy with AutoModelForCausalLM" in output
