"""Five runs that are wrong on purpose: whoever does what they print, and nothing else, mends each in two steps or one.

Catches a message that names no key, one that the command line refuses, and a value that does not help.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from command_line import ROOT, SMALL, Job, Result, run_job

from rlplug.observability.metrics_log import read_metrics

pytestmark = pytest.mark.nightly

STEPS = 2
JUDGED = ("--model.num_steps", "24")  # advice judges runs of 20 steps and more
KEY = r"((?:data|model|rollout|trainer)(?:\.\w+)+)"


def settings(said: str) -> list[tuple[str, str]]:
    """Return the keys of the sentence that says what to set, with their values; of advice, the first with a value."""
    if found := re.search(r"Smallest change that makes it fit: (.*?) model\.memory\.on_shortfall", said):
        return re.findall(rf"{KEY}: ([\w.]*\w)", found[1])
    if found := re.search(rf"(\d+) requests waited: raise {KEY} from (\d+)(?: to (\d+))?", said):
        waited, key, before, value = found.groups()
        return [(key, value or str(int(before) + int(waited)))]  # room for those that waited
    return re.findall(rf"Key: {KEY}: (\w+);", said)[:1]


def follow(result: Result, line: list[str]) -> list[str]:
    """Return the command line with what a run asks for, and nothing else."""
    said = result.message
    if found := re.search(rf"there is no key '([\w.]+)'\. It is \w+'s, and here {KEY}", said):
        return [f"--{found[2]}" if word == f"--{found[1]}" else word for word in line]
    asked = settings(said)
    assert asked, f"it says no key with a value:\n{result.output[-3000:]}"
    return [*line, *(word for key, value in asked for word in (f"--{key}", value))]


def mend(line: list[str], is_right: Callable[[Result, Path], bool], folder: Path) -> int:
    """Run a command line, and change it as the run says until it is right; return how many changes that took."""
    for step in range(STEPS + 1):
        runs = folder / f"runs-{step}"
        result = run_job(Job([*line, "--run.dir", str(runs)]), folder / f"{step}.log")
        if is_right(result, runs / "001"):
            return step
        if step < STEPS:
            line = follow(result, line)
    raise AssertionError(f"after {STEPS} steps it is as wrong as before:\n{result.output[-3000:]}")


def metrics(run: Path, name: str) -> list[float]:
    return [row[name] for row in read_metrics(run / "metrics.jsonl") if name in row]


def test_a_run_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe for a GPU of 80 GiB, on one of 24."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    arguments = importlib.import_module("recipes").planned_with("grpo_qwen3_0.6b", tmp_path)
    line = ["plan", "--gpu-gib", "24", *arguments]

    assert mend(line, lambda result, _: result.exit_code == 0, tmp_path) in (1, STEPS)


def test_an_engine_whose_slots_are_too_few(tmp_path: Path) -> None:
    """64 requests a step, of which four run at once."""
    engine = '{"class_path": "tests.integration.wrong_parts.Scheduled", "init_args": {"max_num_seqs": 4}}'
    line = [*SMALL, "--model.batch.prompts_per_step", "16", "--model.num_steps", "3", "--model.rollout", engine]

    def is_right(result: Result, run: Path) -> bool:
        assert result.exit_code == 0, result.output[-3000:]
        return metrics(run, "rollout/waiting") == [0.0] * 3

    assert mend(line, is_right, tmp_path) in (1, STEPS)


def test_a_reward_that_rolls_dice(tmp_path: Path) -> None:
    dice = '[{"class_path": "FunctionReward", "init_args": {"function": "tests.integration.wrong_parts.dice"}}]'
    patience = ["--model.limits.max_reward_error_share", "1"]  # a busy machine may take longer than a verifier may
    sizes = ["--model.batch.group_size", "8", "--model.sampling.max_new_tokens", "2"]
    line = [*SMALL, *JUDGED, *sizes, *patience, "--model.rewards", dice]

    def is_right(result: Result, run: Path) -> bool:
        assert result.exit_code == 0, result.output[-3000:]
        return "is noisy" not in result.message

    assert mend(line, is_right, tmp_path) in (1, STEPS)


def test_keys_of_verl(tmp_path: Path) -> None:
    line = [*SMALL, "--model.num_steps", "1", "--actor_rollout_ref.rollout.n", "2", "--data.train_batch_size", "8"]

    def is_right(result: Result, run: Path) -> bool:
        if result.exit_code:
            return False
        batch = yaml.safe_load((run / "config.yaml").read_text())["model"]["batch"]
        return (batch["prompts_per_step"], batch["group_size"]) == (8, 2)

    assert mend(line, is_right, tmp_path) in (1, STEPS)


def test_data_that_are_read_too_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of which one row in fifty is short enough to train on."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    prompts = [f"{number:03}>" if number % 50 == 0 else "1" * 2_000 for number in range(1000)]
    rows = [json.dumps({"prompt": prompt, "answer": prompt[:3]}) + "\n" for prompt in prompts]
    (data / "train.jsonl").write_text("".join(rows))
    source = {
        "class_path": "HFDatasetSource",
        "init_args": {"path": str(data), "streaming": True, "shuffle_buffer": 50},
    }
    line = [*SMALL, *JUDGED, "--data.too_long", "filter", "--data.max_prompt_tokens", "8", "--data.train"]

    def is_right(result: Result, run: Path) -> bool:
        assert result.exit_code == 0, result.output[-3000:]
        return sum(metrics(run, "time/prompts")) < 0.05 * sum(metrics(run, "time/step"))

    assert mend([*line, json.dumps(source)], is_right, tmp_path) in (1, STEPS)
