"""Runs that generate while the policy trains, killed and resumed, also on another number of ranks."""

from __future__ import annotations

import pytest
from asynchronous_metrics import check_bound, check_validations
from command_line import SMALL, Job, run_job

NUM_STEPS, BOUND = 5, 1
RUN = [
    *(*SMALL, "--model.num_steps", str(NUM_STEPS), "--checkpoint.every_n_steps", "2"),
    *("--model.validation.every_n_steps", "2", "--model.validation.beside_training", "true"),
    *("--model.rollout", "streaming_parts.BesideTheTrainer", "--model.algorithm.correction", "{}"),
    *("--model.partial_rollout", f"{{asynchronous: true, max_staleness: {BOUND}}}"),
]
STOPS = [
    (signal, phase) for signal in ("SIGKILL", "SIGTERM") for phase in ("rollout", "rewards", "update", "checkpoint")
]


@pytest.mark.nightly
@pytest.mark.parametrize(("signal", "phase"), STOPS)
def test_a_stopped_run_goes_on_within_its_bound(tmp_path, signal, phase):
    """It catches groups that a checkpoint loses or doubles, a bound that a resume widens, and ranks that wait.

    Of validations beside the training it catches one that a resume loses or repeats, scores that are logged at another
    step than their policy's, and tokens of a newer policy.
    """
    folder = tmp_path / "run" / "001"
    stop = {"signal": signal, "phase": phase, "step": 4 if phase == "checkpoint" else 3, "rank": 0}
    two = [*RUN, "--run.dir", str(folder.parent), "--trainer.devices", "2"]
    stopped = run_job(Job(two, stop, num_ranks=2), tmp_path / "log", timeout=120)
    assert stopped.exit_code[0] == {"SIGKILL": -9, "SIGTERM": 143}[signal], stopped.output[-3000:]
    resumed = run_job(Job(["fit", "--resume", str(folder), "--trainer.devices", "1"]), tmp_path / "log2", timeout=120)
    assert resumed.exit_code == 0, resumed.output[-3000:]
    check_bound(folder, NUM_STEPS, BOUND, prompts_per_step=4)
    is_broken_off = (signal, phase) == ("SIGTERM", "update")  # of step 3, which ends; its validation is of step 2
    check_validations(folder, *(([4], [2]) if is_broken_off else ([2, 4], [])))
