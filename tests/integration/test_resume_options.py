"""Runs that are resumed with other options, from an earlier checkpoint, twice at once, or after the disk was full."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from command_line import ROOT, SMALL, Job, Runs
from forked import ForkedProcess

from rlplug.distributed.checkpoints.files import OTHERS, list_checkpoints
from rlplug.observability.metrics_log import read_metrics

SAVER = "{class_path: ModelCheckpoint, init_args: {monitor: reward/mean, mode: max, filename: '{step}'}}"
RUN = [*SMALL, "--model.num_steps", "4", "--checkpoint.every_n_steps", "2", "--model.batch.mini_batch_size", "8"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("options")
    return Runs({"base": Job([*RUN, "--trainer.callbacks+", SAVER, "--run.dir", str(folder / "base")])}, folder)


def resume(runs: Runs, name: str, *options: str) -> Path:
    """Let a copy of the finished run go on with ``options``; return its folder."""
    runs.ended("base")
    run_dir = runs.folder / name / "001"
    if not run_dir.exists():
        shutil.copytree(runs.folder / "base" / "001", run_dir)
    runs.jobs[name] = Job(["fit", "--resume", str(run_dir), *options])
    return run_dir


def rows(run_dir: Path) -> list[dict[str, float]]:
    return read_metrics(run_dir / "metrics.jsonl")


def test_a_run_that_ends_early_says_so(runs: Runs) -> None:
    """Alone catches a run that ``trainer.max_time`` or a callback ends, and that reads as if it had been whole."""
    run_dir = resume(runs, "early", "--num_steps", "400", "--trainer.max_time", "00:00:00:01")
    output = runs.ended("early").output

    message = json.loads((run_dir / "run.json").read_text())["message"]
    assert re.fullmatch(r"ended after step \d+ of 400, by trainer.max_time or a callback", message), message
    assert message in output


def test_model_checkpoint_keeps_the_step_with_the_best_metric(runs: Runs) -> None:
    """It catches a Lightning whose callback no longer gets the metrics of a step, and saves nothing."""
    runs.ended("base")
    run_dir = runs.folder / "base" / "001"
    best = max(rows(run_dir), key=lambda row: row["reward/mean"])
    assert [path.stem for path in (run_dir / "best").iterdir()] == [f"step={best['step']}"]


def test_a_changed_learning_rate_takes_effect_and_lost_rows_come_back(runs: Runs) -> None:
    """Alone catches rows of steps before the checkpoint that are gone because a log file was emptied in between.

    And a run that cannot go on with a row more of data, though that is allowed.
    """
    train = (ROOT / "examples" / "quickstart" / "train.jsonl").read_text()
    longer = runs.folder / "longer.jsonl"
    longer.write_text(train + train.splitlines()[0].replace("125", "000") + "\n")
    schedule = "{class_path: torch.optim.lr_scheduler.ExponentialLR, init_args: {gamma: 0.5}}"
    options = ["--model.optimizer.init_args.lr", "1e-2", "--model.lr_scheduler", schedule, "--model.num_steps", "6"]
    options += ["--data.train.init_args.path", str(longer)]
    options += ["--run.allow_changes", "[data, model.optimizer, model.lr_scheduler]"]
    run_dir = resume(runs, "rate", *options)
    written = {name: (run_dir / name).read_text() for name in ("metrics.jsonl", "samples.jsonl")}
    for name in written:
        (run_dir / name).write_text("")
    output = runs.ended("rate").output
    assert [row["policy/lr"] for row in rows(run_dir)[3:]] == [5e-4, 1e-2 / 16, 1e-2 / 32]
    assert "  allowed  model.optimizer.init_args.lr: 0.0005 -> 0.01\n" in output
    assert "  noted    model.num_steps: 4 -> 6\n" in output
    assert "A new pass over the prompts begins" in " ".join(output.split())
    assert all((run_dir / name).read_text().startswith(text) for name, text in written.items())
    changes = json.loads((run_dir / "run.json").read_text())["changes"]
    assert [each["what"] for each in changes if each["effect"] == "noted"] == ["model.num_steps: 4 -> 6"]


TWELVE = (
    "refused seed_everything: 0 -> 7",
    "stops data.train.init_args.path: ",
    "stops data answers: ",
    "stops model.algorithm.class_path: rlplug_algos.GRPO -> rlplug_algos.RLOO",
    "stops model.rewards.0.init_args.weight: 1.0 -> 2.0",
    "stops model.optimizer.init_args.lr: 0.0005 -> 0.01",
    "stops model.sampling.temperature: 1.0 -> 0.7",
    "stops model.policy config.json: before -> ",
    "stops code examples/quickstart/reward.py: before -> ",
    "stops versions torch: before -> ",
    "stops versions rlplug: before -> ",
    "noted model.num_steps: 4 -> 5",
)


def test_twelve_changes_are_refused_in_one_table(runs: Runs) -> None:
    """Alone catches a change that the comparison knows and a run does not ask it about.

    Of what no option changes, the checkpoint's record is another one: files of the model and of code, versions.
    """
    lines = (ROOT / "examples" / "quickstart" / "train.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(lines[0])
    changed = runs.folder / "other" / "train.jsonl"
    changed.parent.mkdir()
    changed.write_text("".join([json.dumps(row | {"answer": row["answer"][::-1] + "0"}) + "\n", *lines[1:]]))
    options = ["--data.train.init_args.path", str(changed), "--model.algorithm", "RLOO", "--model.num_steps", "5"]
    options += [
        "--seed_everything",
        "7",
        "--model.sampling.temperature",
        "0.7",
        "--model.rewards.init_args.weight",
        "2",
    ]
    options += ["--model.optimizer.init_args.lr", "1e-2"]
    run_dir = resume(runs, "other data", *options)
    others = list_checkpoints(run_dir)[-1] / OTHERS
    kept = torch.load(others, weights_only=True)
    for section, name in (
        *(("model.policy", "config.json"), ("code", "examples/quickstart/reward.py")),
        *(("versions", "torch"), ("versions", "rlplug")),
    ):
        kept["provenance"][section][name] = "before"
    torch.save(kept, others)
    before = {path: path.read_bytes() for path in run_dir.glob("*.*") if path.name != "run.lock"}
    message = runs.ended("other data", 2).message
    assert [each for each in TWELVE if each not in message] == [], message
    assert "Undo it, or start a new run." in message
    assert {path: path.read_bytes() for path in run_dir.glob("*.*") if path.name != "run.lock"} == before


@pytest.mark.parametrize("option", ["--model.batch.mini_batch_size=100", "--seed_everything=7", "--model.num_stepz=3"])
def test_a_refused_option_changes_nothing(runs: Runs, option: str) -> None:
    run_dir = resume(runs, option.strip("-"), option)
    before = {path: path.read_bytes() for path in run_dir.glob("*.*") if path.name != "run.lock"}
    runs.ended(option.strip("-"), 2)
    assert {path: path.read_bytes() for path in run_dir.glob("*.*") if path.name != "run.lock"} == before


def test_from_an_earlier_checkpoint_the_newest_is_what_was_trained_last(runs: Runs) -> None:
    run_dir = resume(runs, "earlier", "--model.num_steps", "3")
    first = run_dir / "checkpoints" / "step-00000002"
    runs.jobs["earlier"].arguments += ["--ckpt_path", str(first)]
    output = runs.ended("earlier").message
    assert [path.name for path in list_checkpoints(run_dir)] == ["step-00000002", "step-00000003"]
    assert (run_dir / "checkpoints" / "abandoned-1" / "step-00000004" / "manifest.json").is_file()
    assert "the checkpoints after step 2 are now in" in output
    assert [row["step"] for row in rows(run_dir)] == [1, 2, 3]


def test_two_at_once_end_with_a_message(runs: Runs) -> None:
    run_dir = resume(runs, "twice", "--model.num_steps", "5")
    code = (
        "import sys, time; from pathlib import Path; from rlplug.distributed.durable_files import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1])); print('locked', flush=True); time.sleep(600)"
    )
    owner = ForkedProcess([sys.executable, "-c", code, run_dir])
    try:
        while "locked" not in owner.stdout:
            assert owner.poll() is None, owner.stdout
        message = runs.ended("twice", 1).message
    finally:
        owner.kill()
    assert f"{run_dir} belongs to a run that is still going on ('process {owner.pid} on" in message


def test_a_full_disk_is_told_and_cuts_no_line(runs: Runs) -> None:
    """The kernel refuses what goes beyond 20 kB: samples of later steps alone. It catches a line that is cut."""
    folder = runs.folder / "full"
    line = [*RUN, "--checkpoint.every_n_steps", "100", "--run.samples_per_step", "64", "--run.dir", str(folder)]
    line += ["--model.num_steps", "20"]
    runs.jobs["full"] = Job(line, {"max_file_bytes": 20_000})
    result = runs.ended("full", 1)
    assert "samples.jsonl cannot be written: File too large (" in result.message
    assert result.output.count("rlplug: ") == 1
    assert (folder / "001" / "samples.jsonl").read_bytes().endswith(b"\n")
