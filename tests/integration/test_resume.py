"""A run that is killed or interrupted in any phase, and resumed, equals one that was left alone, bit for bit."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from command_line import SMALL, Job, run_jobs

from rlplug.distributed.checkpoint import list_checkpoints
from rlplug.observability.phase_timer import PHASES

KILLED_IN = (*PHASES, "validate", "checkpoint")
INTERRUPTED_IN = ("rollout", "advantages", "update", "publish")

RUN = [
    *(*SMALL, "--model.num_steps", "5", "--model.validation.every_n_steps", "2", "--checkpoint.every_n_steps", "2"),
    *("--model.batch.mini_batch_size", "8", "--model.batch.num_epochs", "2", "--model.batch.max_tokens_per_gpu", "64"),
]
ACTOR_CRITIC = [
    *(*RUN, "--model.algorithm", "PPO", "--model.algorithm.kl_coefficient", "0.05"),
    *("--model.algorithm.kl_target", "0.001", "--model.algorithm.kl_horizon", "100"),
    *("--model.critic", "{warmup_steps: 1, optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.001}}}"),
]
"""With all that a checkpoint holds beside the policy: a critic, its optimizer, an adaptive KL coefficient."""
PARTIAL = [
    *("fit", "--config", "configs/hidden_digit.yaml", "--model.num_steps", "6", "--checkpoint.every_n_steps", "2"),
    *("--model.batch.prompts_per_step", "4", "--model.batch.group_size", "4", "--model.algorithm.correction", "{}"),
    *("--model.partial_rollout", "{max_tokens_per_step: 2, groups_in_flight: 6}"),
]
"""With trajectories under way, whose environments are gone with the process."""
UNREPEATABLE = ("environment/seconds", "time/", "memory/", "throughput/", "rollout/tokens_per_s", "sync/", "offload/")
"""What depends on the clock, and on whether the engine is a new one that has no weights yet."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run undisturbed, and stopped and resumed in every way; each ends in a folder of its own below."""
    folder = tmp_path_factory.mktemp("resume")
    jobs = {"undisturbed": Job([*RUN, "--run.dir", str(folder / "undisturbed")])}
    expected = {"undisturbed": 0}
    ways = [("SIGKILL", phase) for phase in KILLED_IN] + [("SIGINT", phase) for phase in INTERRUPTED_IN]
    for number, phase in ways:
        name = f"{number}-{phase}"
        # validation and checkpoints are due after every second step
        stop = {"signal": number, "phase": phase, "step": 4 if phase in ("validate", "checkpoint") else 3}
        jobs[name] = Job([*RUN, "--run.dir", str(folder / name)], stop)
        jobs[f"{name}-resumed"] = Job(["fit", "--resume", str(folder / name / "001")])
        expected |= {name: -9 if number == "SIGKILL" else 130, f"{name}-resumed": 0}
    for name, step in (("critic", None), ("critic-killed", 3)):
        stop = {"signal": "SIGKILL", "phase": "update", "step": step} if step else {}
        jobs[name] = Job([*ACTOR_CRITIC, "--run.dir", str(folder / name)], stop)
        expected[name] = -9 if step else 0
    early = {"signal": "SIGINT", "phase": "rollout", "step": 1}  # before any optimizer has stepped
    jobs["critic-early"] = Job([*ACTOR_CRITIC, "--run.dir", str(folder / "critic-early")], early)
    for name in ("critic-killed", "critic-early"):
        jobs[f"{name}-resumed"] = Job(["fit", "--resume", str(folder / name / "001")])
    in_background = [*RUN, "--checkpoint.asynchronous", "true", "--run.dir", str(folder / "in-background")]
    jobs["in-background"] = Job(in_background, {"signal": "SIGINT", "phase": "publish", "step": 3})
    jobs["in-background-resumed"] = Job(["fit", "--resume", str(folder / "in-background" / "001")])
    jobs["disk-full"] = Job(
        [*RUN, "--checkpoint.asynchronous", "true", "--run.dir", str(folder / "disk-full")],
        {"max_file_bytes": 1 << 20},
    )
    expected |= {"in-background": 130, "in-background-resumed": 0, "disk-full": 1}
    every_step = ["--checkpoint.every_n_steps", "1", "--run.dir", str(folder / "critic-every-step")]
    jobs["critic-every-step"] = Job([*ACTOR_CRITIC, *every_step])  # in the warm-up too
    expected |= dict.fromkeys(("critic-killed-resumed", "critic-early-resumed", "critic-every-step"), 0)
    expected["critic-early"] = 130
    jobs["partial"] = Job([*PARTIAL, "--run.dir", str(folder / "partial")])
    for number, code in (("SIGKILL", -9), ("SIGINT", 130)):
        name = f"partial-{number}"
        stop = {"signal": number, "phase": "logprobs", "step": 5}
        jobs[name] = Job([*PARTIAL, "--run.dir", str(folder / name)], stop)
        jobs[f"{name}-resumed"] = Job(["fit", "--resume", str(folder / name / "001")])
        expected |= {"partial": 0, name: code, f"{name}-resumed": 0}
    results = run_jobs(jobs, folder)
    for name, result in results.items():
        assert result.exit_code == expected[name], f"{name}: {result.output[-3000:]}"
    return folder


def metrics(run_dir: Path) -> list[dict[str, str]]:
    """Return the rows of ``metrics.csv`` without what depends on the clock."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith(UNREPEATABLE)} for row in rows]


def assert_same_run(resumed: Path, undisturbed: Path) -> None:
    """Compare metrics, samples and trained weights, to the last bit."""
    assert metrics(resumed) == metrics(undisturbed)
    assert (resumed / "samples.jsonl").read_text() == (undisturbed / "samples.jsonl").read_text()
    weights = Path("policy") / "model.safetensors"
    assert (resumed / weights).read_bytes() == (undisturbed / weights).read_bytes()


@pytest.mark.parametrize("phase", KILLED_IN)
def test_killed_in_any_phase_and_resumed_equals_undisturbed(finished: Path, phase: str) -> None:
    assert_same_run(finished / f"SIGKILL-{phase}" / "001", finished / "undisturbed" / "001")


@pytest.mark.parametrize("phase", INTERRUPTED_IN)
def test_ctrl_c_saves_and_resumes_exactly(finished: Path, phase: str) -> None:
    resumed = finished / f"SIGINT-{phase}" / "001"

    assert_same_run(resumed, finished / "undisturbed" / "001")
    log = (finished / f"SIGINT-{phase}.log").read_text()
    assert f"rlplug fit --resume {resumed}" in " ".join(log.split())


def test_ctrl_c_with_checkpoints_in_the_background(finished: Path) -> None:
    assert_same_run(finished / "in-background" / "001", finished / "undisturbed" / "001")
    log = (finished / "in-background.log").read_text()
    assert "checkpoint step-00000002 was written in the background" in log
    saved = "".join(log.partition("saved as")[2].split())  # terminals wrap paths anywhere
    assert saved.startswith(str(finished / "in-background" / "001" / "checkpoints" / "step-00000003"))


def test_a_full_disk_is_told_when_the_write_in_the_background_fails(finished: Path) -> None:
    log = " ".join((finished / "disk-full.log").read_text().split())
    assert "step-00000002 could not be written" in log
    assert "There is no previous checkpoint; free some space, then continue with: rlplug fit --resume" in log
    assert not list((finished / "disk-full" / "001" / "checkpoints").iterdir())


@pytest.mark.parametrize("way", ["killed", "early", "every-step"])
def test_a_run_with_a_critic_resumes_exactly(finished: Path, way: str) -> None:
    assert_same_run(finished / f"critic-{way}" / "001", finished / "critic" / "001")


def test_the_critic_and_the_coefficient_of_that_run_learn(finished: Path) -> None:
    rows = metrics(finished / "critic" / "001")
    assert rows[0]["loss"] == ""  # the warm-up trains the critic alone
    assert len({row["critic/loss"] for row in rows}) == 5
    assert len({row["policy/kl_coefficient"] for row in rows[1:]}) == 4  # it adapts


@pytest.mark.parametrize("number", ["SIGKILL", "SIGINT"])
def test_a_partial_rollout_resumes_with_what_was_in_flight(finished: Path, number: str) -> None:
    assert_same_run(finished / f"partial-{number}" / "001", finished / "partial" / "001")


def test_that_partial_rollout_has_tokens_of_former_policies(finished: Path) -> None:
    rows = metrics(finished / "partial" / "001")
    assert any(float(row["partial/former_share"]) > 0 for row in rows)
    assert all(float(row["partial/groups_in_flight"]) > 0 for row in rows)


def test_the_run_is_long_enough_to_notice_a_lost_step(finished: Path) -> None:
    rows = metrics(finished / "undisturbed" / "001")

    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert len({row["loss"] for row in rows}) == 5  # the weights change from step to step
    assert [path.name for path in list_checkpoints(finished / "undisturbed" / "001")] == [
        "step-00000004",
        "step-00000005",
    ]
