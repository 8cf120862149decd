"""A run that is killed or interrupted in any phase, and resumed, equals one that was left alone, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT, SMALL, Job, Runs, samples
from experts_model import make_experts_model

from rlplug.distributed.checkpoints.files import list_checkpoints
from rlplug.observability.metrics_log import read_metrics
from rlplug.observability.phase_timer import PHASES

KILLED_IN = (*PHASES, "validate", "checkpoint")
INTERRUPTED_IN = ("sync", "rollout", "advantages", "update", "publish", "validate")

SCALED = (
    "{class_path: ScaledReward, init_args: {clip: [0, 1], scale: running, reward: {class_path: FunctionReward, "
    "init_args: {function: examples.quickstart.reward.digits_in_place}}}}"
)
"""A reward with a state of its own, which a step that is undone, or lost, must not have changed."""
RUN = [
    *(*SMALL, "--model.num_steps", "5", "--model.validation.every_n_steps", "2", "--checkpoint.every_n_steps", "2"),
    *("--model.rewards", f"[{SCALED}]"),
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
REPLAY = [
    *(*PARTIAL, "--checkpoint.every_n_steps", "1", "--model.policy.init", "pretrained"),
    *("--model.rollout", "parts.BFloat16Engine", "--model.router_replay", "true"),
    *("--model.limits.mismatch_gate", "null"),
]
"""With tokens under way that have experts to replay."""
UNREPEATABLE = (
    *("environment/seconds", "reward_seconds/", "time/", "memory/", "throughput/", "rollout/tokens_per_s", "sync/"),
    "offload/",
)
"""What depends on the clock, and on whether the engine is a new one that has no weights yet."""


class Finished(Runs):
    """Runs in folders of their own, by name."""

    def add(self, name: str, line: list[str], stop: dict[str, Any] | None = None) -> None:
        self.jobs[name] = Job([*line, "--run.dir", str(self.folder / name)], stop or {})

    def add_stopped(self, name: str, line: list[str], stop: dict[str, Any]) -> None:
        """Add a run that is stopped, and ``NAME-resumed``, which goes on with it to the end in the same folder."""
        self.add(name, line, stop)
        self.jobs[f"{name}-resumed"] = Job(["fit", "--resume", str(self.folder / name / "001")], after=name)

    def run_dir(self, name: str) -> Path:
        """Return the folder of a run that has ended as it must, and that was resumed if it was stopped."""
        signal = self.jobs[name].extra.get("signal")
        self.ended(name, {None: 0, "SIGKILL": -9, "SIGINT": 130}[signal])
        if signal:
            self.ended(f"{name}-resumed")
        return self.folder / name / "001"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Runs undisturbed, and stopped and resumed in every way."""
    runs = Finished({}, tmp_path_factory.mktemp("resume"))
    runs.add("undisturbed", RUN)
    for number, phase in [("SIGKILL", phase) for phase in KILLED_IN] + [("SIGINT", phase) for phase in INTERRUPTED_IN]:
        # validation and checkpoints are due after every second step
        stop = {"signal": number, "phase": phase, "step": 4 if phase in ("validate", "checkpoint") else 3}
        runs.add_stopped(f"{number}-{phase}", RUN, stop)
    runs.add("critic", ACTOR_CRITIC)
    runs.add_stopped("critic-killed", ACTOR_CRITIC, {"signal": "SIGKILL", "phase": "update", "step": 3})
    early = {"signal": "SIGINT", "phase": "rollout", "step": 1}  # before any optimizer has stepped
    runs.add_stopped("critic-early", ACTOR_CRITIC, early)
    runs.add("critic-every-step", [*ACTOR_CRITIC, "--checkpoint.every_n_steps", "1"])  # in the warm-up too
    in_background = [*RUN, "--checkpoint.asynchronous", "true"]
    runs.add_stopped("in-background", in_background, {"signal": "SIGINT", "phase": "publish", "step": 3})
    runs.add("disk-full", in_background, {"max_file_bytes": 1 << 20})
    experts = make_experts_model(runs.folder / "experts", ROOT / "examples" / "hidden_digit" / "model")
    replay = [*REPLAY, "--model.policy.path", str(experts)]
    runs.add("replay", replay)
    # in the seventh round of generation: the first step takes two to four of them, and every other one or more
    runs.add_stopped("replay-SIGKILL", replay, {"signal": "SIGKILL", "phase": "rollout", "step": 7})
    runs.add("partial", PARTIAL)
    for number in ("SIGKILL", "SIGINT"):
        runs.add_stopped(f"partial-{number}", PARTIAL, {"signal": number, "phase": "logprobs", "step": 5})
    return runs


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """Return the rows of ``metrics.jsonl`` without what depends on the clock."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(UNREPEATABLE)} for row in rows]


def tokens(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run_dir / "tokens").iterdir()}


def curve(run_dir: Path) -> list[tuple[int, float]]:
    """Return the mean reward of each step as TensorBoard draws it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars("reward/mean")]


def assert_same_run(resumed: Path, undisturbed: Path) -> None:
    """Compare metrics, samples, tokens and trained weights, to the last bit, and that no curve has a step twice."""
    assert metrics(resumed) == metrics(undisturbed)
    assert curve(resumed) == curve(undisturbed)
    assert (resumed / "samples.jsonl").read_text() == (undisturbed / "samples.jsonl").read_text()
    assert tokens(resumed) == tokens(undisturbed) != {}
    weights = Path("policy") / "model.safetensors"
    assert (resumed / weights).read_bytes() == (undisturbed / weights).read_bytes()


@pytest.mark.parametrize("phase", samples(KILLED_IN, "update"))
def test_killed_in_any_phase_and_resumed_equals_undisturbed(finished: Finished, phase: str) -> None:
    assert_same_run(finished.run_dir(f"SIGKILL-{phase}"), finished.run_dir("undisturbed"))


@pytest.mark.parametrize("phase", samples(INTERRUPTED_IN, "rollout"))
def test_ctrl_c_saves_and_resumes_exactly(finished: Finished, phase: str) -> None:
    resumed = finished.run_dir(f"SIGINT-{phase}")

    assert_same_run(resumed, finished.run_dir("undisturbed"))
    assert f"rlplug fit --resume {resumed}" in finished[f"SIGINT-{phase}"].message


def test_ctrl_c_with_checkpoints_in_the_background(finished: Finished) -> None:
    resumed = finished.run_dir("in-background")

    assert_same_run(resumed, finished.run_dir("undisturbed"))
    log = finished["in-background"].output
    assert "checkpoint step-00000002 was written in the background" in log
    saved = "".join(log.partition("saved as")[2].split())  # terminals wrap paths anywhere
    assert saved.startswith(str(resumed / "checkpoints" / "step-00000003"))


def test_a_full_disk_is_told_when_the_write_in_the_background_fails(finished: Finished) -> None:
    message = finished.ended("disk-full", 1).message

    assert "step-00000002 could not be written: OSError: [Errno 27] File too large (" in message
    assert "There is no previous checkpoint; free some space, then continue with: rlplug fit --resume" in message
    assert not list((finished.folder / "disk-full" / "001" / "checkpoints").iterdir())


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["killed", "early", "every-step"])
def test_a_run_with_a_critic_resumes_exactly(finished: Finished, way: str) -> None:
    assert_same_run(finished.run_dir(f"critic-{way}"), finished.run_dir("critic"))


def test_the_critic_and_the_coefficient_of_that_run_learn(finished: Finished) -> None:
    rows = metrics(finished.run_dir("critic"))
    assert "loss" not in rows[0]  # the warm-up trains the critic alone
    assert len({row["critic/loss"] for row in rows}) == 5
    assert len({row["policy/kl_coefficient"] for row in rows[1:]}) == 4  # it adapts


@pytest.mark.parametrize("number", samples(("SIGKILL", "SIGINT")))
def test_a_partial_rollout_resumes_with_what_was_in_flight(finished: Finished, number: str) -> None:
    assert_same_run(finished.run_dir(f"partial-{number}"), finished.run_dir("partial"))


@pytest.mark.nightly
def test_a_partial_rollout_resumes_with_the_experts_of_its_tokens(finished: Finished) -> None:
    """Experts that a checkpoint loses would be read again with newer weights, and others be replayed."""
    assert_same_run(finished.run_dir("replay-SIGKILL"), finished.run_dir("replay"))
    rows = metrics(finished.run_dir("replay"))
    assert any(row["partial/previous_share"] > 0 for row in rows)
    assert all(0 < row["router/differ"] < 1 for row in rows)


def test_that_partial_rollout_has_tokens_of_former_policies(finished: Finished) -> None:
    rows = metrics(finished.run_dir("partial"))
    assert any(row["partial/previous_share"] > 0 for row in rows)
    assert all(row["partial/groups_in_flight"] > 0 for row in rows)


def test_the_run_is_long_enough_to_notice_a_lost_step(finished: Finished) -> None:
    rows = metrics(finished.run_dir("undisturbed"))

    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert len({row["loss"] for row in rows}) == 5  # the weights change from step to step
    checkpoints = list_checkpoints(finished.run_dir("undisturbed"))
    assert [path.name for path in checkpoints] == ["step-00000004", "step-00000005"]
