"""``rlplug eval``, ``chat`` and ``export`` from the command line, on a run of two steps."""

from __future__ import annotations

import json

import pytest
from command_line import SMALL, Job, Runs

from rlplug.observability.metrics_log import read_metrics


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    run, evals = str(folder / "runs" / "001"), str(folder / "evals")
    lines = {
        "train": [
            *(*SMALL, "--run.dir", str(folder / "runs"), "--model.num_steps", "2", "--checkpoint.every_n_steps", "1"),
            *("--model.validation.every_n_steps", "2"),
        ],
        "greedy": [
            *("eval", run, "--base", f"newest={run}/checkpoints/step-00000002", "--out", evals),
            "--model.rewards+=parts.PlacedReward",
        ],
        "whole": ["eval", run, f"first={run}/checkpoints/step-00000001", "-n", "2", "--out", str(folder / "whole")],
        "resumed": ["eval", "--resume", str(folder / "cut" / "001")],
        "no cache": ["eval", run, "--out", f"{evals}-refused", "--run.compile_cache", f"{run}/metrics.jsonl/cache"],
        "no data": ["eval", run, "--out", f"{evals}-refused", "--data", "no_file.jsonl"],
        "no class": ["eval", run, "--out", f"{evals}-refused", "--data", "{class_path: no_module.Source}"],
        "no policy": ["eval", run, "--out", f"{evals}-refused", "runs/none/001"],
        "no model": ["eval", run, "--out", f"{evals}-refused", "tests"],
        "no run": ["eval", "runs/none/001", "--out", f"{evals}-refused"],
        "chat": ["chat", run, "--seed", "1"],
        "export": ["export", f"{run}/checkpoints/step-00000002", "--to", str(folder / "exported")],
    }
    jobs = {name: Job(line, after=None if name == "train" else "train") for name, line in lines.items()}
    jobs["chat"].extra = {"stdin": "439>\n/temperature 0\n439>\n\n/quit\nnever read\n"}
    cut = [*lines["whole"][:-1], str(folder / "cut"), "--batch-size", "16"]
    jobs["cut"] = Job(cut, {"max_file_bytes": 40_000}, after="train")
    return Runs(jobs, folder)


def completions(folder):
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def test_a_run_its_checkpoint_and_its_base(runs):
    """The trained policy scores as the run's own validation did, from the folder and from the checkpoint alike."""
    output = runs.ended("greedy").output
    assert "less base" in output
    folder = runs.folder / "evals" / "001"
    results = {each["policy"]: each for each in json.loads((folder / "results.json").read_text())["results"]}
    last = read_metrics(runs.folder / "runs" / "001" / "metrics.jsonl")[-1]
    base, run, newest = results.values()
    assert run["reward"]["mean"] == pytest.approx(last["validate/reward_mean"], abs=1e-9)
    assert run["length"]["mean"] == pytest.approx(last["validate/length_mean"], abs=1e-9)
    assert run | {"policy": "newest"} == newest
    assert run["reward_counts"] == {"placed/cost": run["num_samples"] / 8, "placed/scored": run["num_samples"]}
    assert "placed: on cpu" in output
    assert "placed/scored" in output
    assert "placed/cost" in (folder / "report.html").read_text()
    texts = {name: [row["completion"] for row in completions(folder) if row["policy"] == name] for name in results}
    assert texts["base"] != texts["newest"], "two steps change a greedy completion of some prompt"
    assert base["num_errors"] == 0
    assert "tables: " in output
    assert (folder / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no cache", "metrics.jsonl/cache, which cannot be used: Not a directory"),
        ("no data", "--data no_file.jsonl: no file of prompts has that name"),
        ("no class", "there is no module 'no_module'"),
        ("no policy", "the policy 'runs/none/001' does not exist. Give the folder of a run"),
        ("no model", "the policy 'tests' is no folder of a model: it has no config.json"),
        ("no run", "'runs/none/001' is no folder of a run, and rlplug eval needs rewards and prompts"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_a_folder_is_made(runs, monkeypatch, name, message):
    """Alone catches a check after the folder, and a message that names a key in place of what was given."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)  # the tests' own, which would win
    assert message in runs.ended(name, 2).message
    assert not (runs.folder / "evals-refused").exists()


def test_a_short_run_says_of_how_many_steps_its_last_reward_is(runs):
    """Alone catches "last 5" of a run with fewer steps."""
    assert "(means of 1 of 2 steps each)" in runs.ended("train").message


def test_a_chat_through_a_pipe(runs):
    output = runs.ended("chat").output
    assert output.count("> 439>") == 2
    assert "temperature 0" in output
    assert output.count("tokens") >= 3
    assert "never read" not in output


def test_a_checkpoint_is_exported_as_the_run_exports_it(runs):
    runs.ended("export")
    policy, exported = runs.folder / "runs" / "001" / "policy", runs.folder / "exported"
    assert (policy / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    assert "trained from scratch" in (policy / "README.md").read_text()
    assert {path.name for path in policy.iterdir()} == {path.name for path in exported.iterdir()}


@pytest.mark.nightly
def test_an_evaluation_that_fails_goes_on_as_if_it_had_not(runs):
    """A full disk ends it between two batches; the rest is generated with the same seeds."""
    runs.ended("whole")
    assert "completions.jsonl cannot be written" in runs.ended("cut", 1).message
    before = len(completions(runs.folder / "cut" / "001"))
    runs.ended("resumed")
    after, whole = (completions(runs.folder / name / "001") for name in ("cut", "whole"))
    assert 0 < before < len(whole)
    assert after == whole
    found, expected = (
        json.loads((runs.folder / name / "001" / "results.json").read_text())["results"] for name in ("cut", "whole")
    )
    assert found == expected
