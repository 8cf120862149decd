"""Whatever a user gets wrong ends in one message, without a traceback, a non-zero exit code, and nothing lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from command_line import ROOT, SMALL, Job, Result, Runs
from safetensors.torch import load_file

from rlplug.observability.metrics_log import read_metrics

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
MODEL = ROOT / "examples" / "quickstart" / "model"


def model_with(folder: Path, **changes: object) -> Path:
    """Copy the quickstart's model folder with another configuration."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def prompts(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return ["--data.train.init_args.path", str(path)]


def reward(function: str) -> list[str]:
    return ["--model.rewards", json.dumps([{"class_path": "FunctionReward", "init_args": {"function": function}}])]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Every wrong command line; the run folders are in ``runs`` below."""
    folder = tmp_path_factory.mktemp("bad")
    small_vocabulary = model_with(folder / "small-vocabulary", vocab_size=9)
    chat = ["--data.chat", "true"]
    corrected = ["--model.algorithm.correction", "{level: token, mode: mask}"]
    stale = ["--model.rollout", "parts.TakesWeightsOnce", "--model.optimizer.init_args.lr", "0.1"]
    wrong = {
        "command": ["train"],
        "key": [*SMALL, "--model.num_stepz", "3"],
        "class": [*SMALL, "--model.algorithm", "GRP0"],
        "package": [*SMALL, "--model.rollout", "Rollout"],
        "option": [*SMALL, "--model.algorithm.init_args.clipp", "0.1"],
        "type": [*SMALL, "--model.batch.group_size", "many"],
        "model": [*SMALL, "--model.policy.path", "./no/such/model"],
        "weights": [*SMALL, "--model.policy.init", "pretrained"],
        "chat": [*SMALL, *chat],
        "vocabulary": [*SMALL, "--model.policy.path", str(small_vocabulary)],
        "empty": [*SMALL, *prompts(folder / "empty.jsonl", "")],
        "malformed": [*SMALL, *prompts(folder / "malformed.jsonl", '{"prompt": "1>"}\n{"prompt": \n')],
        "long": [*SMALL, *prompts(folder / "long.jsonl", json.dumps({"prompt": "1" * 40 + ">", "answer": "1"}) + "\n")],
        "mini": [*SMALL, "--model.batch.mini_batch_size", "5"],
        "budget": [*SMALL, "--model.batch.max_tokens_per_gpu", "5"],
        "no-gradient": [*SMALL, "--model.limits.max_grad_norm", "0"],
        "greedy": [*SMALL, "--model.sampling.temperature", "0"],
        "no-critic": [*SMALL, "--model.algorithm", "PPO"],
        "idle-critic": [*SMALL, "--model.critic", "{}"],
        "idle-reference": [*SMALL, "--model.reference.path", "tests/model"],
        "one-completion": [*SMALL, "--model.algorithm", "DAPO", "--model.batch.group_size", "1"],
        "long-buffer": [*SMALL, "--model.algorithm", "DAPO", "--model.algorithm.overlong_buffer", "4"],
        "no-logprobs": [*SMALL, "--model.rollout", "parts.Silent", *corrected, "--model.limits.mismatch_gate", "null"],
        "no-gate": [*SMALL, "--model.rollout", "parts.Silent"],
        "stale": [*SMALL, *stale],
        "extra": [*SMALL, "--model.sampling.extra.min_p", "0.9"],
        "unknown-extra": [*SMALL, "--model.sampling.extra.minp", "0.9"],
        "context": [*SMALL, "--model.rollout", "parts.LearnsItsContext"],
        "old-version": [*SMALL, "--model.rollout", "parts.StampsAnOldVersion"],
        "exception": [*SMALL, "--model.algorithm", "parts.LosesAKey"],
        "no-return": [*SMALL, "--model.rollout", "parts.NeverReturns", "--model.limits.phase_deadline_s", "3"],
        "strategy": [*SMALL, "--trainer.strategy", "auto"],
        "no-held-out": [*SMALL, "--model.validation.every_n_steps", "1", "--data.val", "null"],
        "no-gpu": [*SMALL, "--trainer.accelerator", "gpu"],
        "file": [*SMALL, "--run.dir", "README.md/runs"],
        "resume": ["fit", "--resume", str(folder)],
        "raises": [*SMALL, *reward("parts.raises")],
        "hangs": [*SMALL, *reward("parts.hangs"), "--model.limits.reward_deadline_s", "0.5"],
        "nan-reward": [*SMALL, *reward("parts.not_a_number")],
        "nan-loss": [*SMALL, "--model.algorithm", "parts.SecondLossIsNaN"],
        "nan-loss-skipped": [
            *(*SMALL, "--model.algorithm", "parts.SecondLossIsNaN"),
            *("--model.limits.on_nonfinite", "skip", "--model.num_steps", "3"),
        ],
        "debug": ["--debug", *SMALL, "--model.num_stepz", "3"],
    }
    runs = {name: ["--run.dir", str(folder / "runs" / name)] for name, line in wrong.items() if SMALL[0] in line[:2]}
    for name in ("resume", "file"):
        runs.pop(name)
    jobs = {name: Job([*line, *runs.get(name, [])]) for name, line in wrong.items()}
    # a disk that is full at the second checkpoint: files may not grow past what the first one left room for
    disk = [*SMALL, "--run.dir", str(folder / "runs" / "disk"), "--checkpoint.every_n_steps", "1"]
    jobs["disk-first"] = Job([*disk, "--model.num_steps", "1"])
    go_on = ["fit", "--resume", str(folder / "runs" / "disk" / "001"), "--model.num_steps", "3"]
    jobs["disk-full"] = Job(go_on, {"max_file_bytes": 1 << 20}, after="disk-first")
    jobs["disk-again"] = Job(go_on, after="disk-full")
    saver = ["--trainer.callbacks+", "{class_path: ModelCheckpoint, init_args: {every_n_train_steps: 1}}"]
    best = [*SMALL, *saver, "--run.dir", str(folder / "runs" / "best"), "--model.num_steps", "2"]
    jobs["best-full"] = Job(best, {"max_file_bytes": 1 << 18})
    return Runs(jobs, folder)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "command",
            ["no command 'train'", "There are fit, validate, audit-reward, certify, chat, check, compare"],
        ),
        ("key", ["no key 'model.num_stepz'", "Did you mean 'model.num_steps'?"]),
        ("class", ["'GRP0' is not a known algorithm", "Did you mean 'GRPO'?", "Registered algorithms:"]),
        ("package", ["'Rollout' is not a known rollout", "Registered rollouts: HFRollout"]),
        ("option", ["model.algorithm", "'clipp'", "Did you mean 'clip_"]),
        ("type", ["model.batch.group_size", "many"]),
        ("model", ["model.policy.path", "'./no/such/model' does not exist"]),
        ("empty", ["data.train", "empty.jsonl"]),
        ("long", ["data.train", "long.jsonl:1", "41", "data.too_long"]),
        ("no-gradient", ["model.limits.max_grad_norm is 0", "give a number from 1e-09 up to"]),
        ("greedy", ["model.sampling.temperature is 0"]),
        ("idle-reference", ["GRPO would not use model.reference", "kl_coefficient"]),
        ("long-buffer", ["DAPO", "overlong_buffer is 4", "max_new_tokens"]),
        ("no-logprobs", ["correction (GRPO)", "'logprobs'", "Silent", "Engines here that can: HFRollout"]),
        ("stale", ["TakesWeightsOnce and the trainer disagree", "step 2", "gate 0.0001", "model.limits.mismatch_gate"]),
        (
            "extra",
            ["HFRollout and the trainer disagree", "step 1", "model.sampling.extra (min_p) changes"],
        ),
        (
            "old-version",
            [
                "StampsAnOldVersion failed again after 2 restarts",
                "StampsAnOldVersion.generate",
                "policy version -1, and",
            ],
        ),
        ("context", ["LearnsItsContext generates up to 6 tokens of prompt and", "Raise rollout.some_length, lower"]),
        ("strategy", ["trainer.strategy", "rlplug.distributed.strategy.RLFSDP2Strategy"]),
        pytest.param("no-gpu", ["trainer.accelerator asks for a device", "set it to cpu"], marks=WITHOUT_GPU),
        ("file", ["run.dir is 'README.md/runs', and README.md is a file: give a folder"]),
        ("resume", ["--resume", "not the folder of a run"]),
        (
            "raises",
            ["16 of 16 samples (100%) have no reward", "'raises'", "KeyError", "model.limits.max_reward_error_share"],
        ),
        ("hangs", ["'hangs'", "took longer than 0.5 s", "model.limits.reward_deadline_s"]),
        ("nan-reward", ["'not_a_number'", "nan", "model.rewards"]),
        ("nan-loss", ["step 2: loss nan", "step-00000002-rank-0.safetensors", "model.limits.on_nonfinite: skip"]),
        ("disk-full", ["could not be written", "File too large", "step-00000001 is complete", "rlplug fit --resume"]),
        ("best-full", ["best could not be written", "There is no previous checkpoint"]),
    ],
)
def test_a_mistake_ends_in_one_message(results: Runs, name: str, parts: list[str]) -> None:
    assert_one_message(results[name], parts)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("mini", ["model.batch.mini_batch_size is 5", "Nearest that do: 4 and 8"]),
        ("budget", ["model.batch.max_tokens_per_gpu is 5", "give at least 8"]),
        ("no-critic", ["PPO needs a critic: set model.critic", "critic: {}"]),
        ("idle-critic", ["GRPO uses no critic", "remove model.critic"]),
        ("one-completion", ["DAPO compares", "model.batch.group_size is 1", "at least 2"]),
        ("vocabulary", ["model.policy.path", "ids up to 11", "embeds only 9"]),
        ("chat", ["data.chat", "chat template", "model.policy.path"]),
        ("malformed", ["data.train", "malformed.jsonl:2"]),
        ("weights", ["model.policy.path", "no weights", "model.safetensors"]),
        ("no-held-out", ["model.validation", "data.val is not set"]),
        ("unknown-extra", ["model.sampling.extra.minp: HFRollout knows no such option", "Did you mean 'min_p'?"]),
        ("no-gate", ["Silent returns no logprobs", "model.limits.mismatch_gate to null"]),
    ],
)
def test_a_mistake_that_unit_tests_know_too_ends_in_one_message(results: Runs, name: str, parts: list[str]) -> None:
    """Their checks and messages are those of ``tests/unit``; here they come by the command line."""
    assert_one_message(results[name], parts)


def assert_one_message(result: Result, parts: list[str]) -> None:
    assert result.exit_code in (1, 2), result.output
    assert result.message.count("rlplug: ") == 1, result.output
    for part in parts:
        assert part in result.message, result.output
    assert "Traceback" not in result.output


def test_an_exception_in_a_plugin_says_whose_it_is_above_its_traceback(results: Runs) -> None:
    result = results["exception"]
    assert result.exit_code == 1
    message, _, traceback = result.output.rpartition("Traceback (most recent call last)")
    assert "rlplug: LosesAKey.loss in " in message, result.output
    assert "raised KeyError: 'kl'" in message, result.output
    assert traceback.rstrip().endswith("KeyError: 'kl'"), result.output


def test_a_call_that_never_returns_ends_by_a_deadline_that_names_it(results: Runs) -> None:
    result = results["no-return"]
    assert result.exit_code == 1
    assert "the phase rollout has not ended in 3 s (model.limits.phase_deadline_s)" in result.output, result.output
    assert "a call of NeverReturns.generate in " in result.output, result.output


def test_debug_shows_the_traceback(results: Runs) -> None:
    assert results["debug"].exit_code == 2
    assert "Traceback" in results["debug"].output


def test_a_nan_loss_leaves_the_batch_for_inspection(results: Runs) -> None:
    for name in ("nan-loss", "nan-loss-skipped"):
        results.ended(name, 0 if name == "nan-loss-skipped" else 1)
        batch = load_file(results.folder / "runs" / name / "001" / "nonfinite" / "step-00000002-rank-0.safetensors")
        assert len(batch["lengths"]) == 16
        assert len(batch["input_ids"]) == batch["lengths"].sum()
        assert {"advantages", "response_mask", "rollout_logprobs", "rewards"} <= batch.keys()


def test_a_nan_loss_can_be_skipped(results: Runs) -> None:
    results.ended("nan-loss-skipped")
    folder = results.folder / "runs" / "nan-loss-skipped" / "001"
    skipped = [row["policy/skipped_updates"] for row in read_metrics(folder / "metrics.jsonl")]

    assert skipped == [0, 1, 0]
    weights = load_file(folder / "policy" / "model.safetensors")
    assert all(torch.isfinite(weight).all() for weight in weights.values())


def test_a_full_disk_leaves_a_checkpoint_to_go_on_from(results: Runs) -> None:
    results.ended("disk-again")
    folder = results.folder / "runs" / "disk" / "001"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]


def test_a_failed_run_says_so_in_its_folder_and_keeps_the_samples(results: Runs) -> None:
    results.ended("raises", 1)
    folder = results.folder / "runs" / "raises" / "001"
    record = json.loads((folder / "run.json").read_text())
    failed = [json.loads(line) for line in (folder / "reward_errors.jsonl").read_text().splitlines()]

    assert record["status"] == "failed"
    assert "KeyError" in record["message"]
    assert len(failed) == 16
    assert "KeyError" in failed[0]["rewards"]["raises"]["error"]
