"""Runs that park their state while the engine generates equal a run that does not, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import Job, samples
from test_resume import ACTOR_CRITIC, assert_same_run
from test_resume_processes import Finished, job, last_checkpoint

from rlplug.observability.metrics_log import read_metrics

RUN = [*ACTOR_CRITIC, "--checkpoint.asynchronous", "true"]
"""With a reference policy, a critic that warms up, and checkpoints after validations."""
MODES = ("optimizer", "optimizer_and_weights")
WAYS = [("one", mode) for mode in MODES] + [("one", "interrupted"), ("two", MODES[1])]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Runs on one process and on two; ``interrupted`` gives its third step up while the state is offloaded."""
    folder = tmp_path_factory.mktemp("offload")

    def arguments(name: str, mode: str) -> list[str]:
        return [*RUN, "--model.memory.offload", mode, "--run.dir", str(folder / name)]

    jobs = {f"one-{mode}": job(arguments(f"one-{mode}", mode), 1) for mode in ("none", *MODES)}
    for mode in ("none", MODES[1]):
        jobs[f"two-{mode}"] = job([*arguments(f"two-{mode}", mode), "--model.num_steps", "3"], 2)
    stop = {"signal": "SIGINT", "phase": "rewards", "step": 3}
    jobs["one-interrupted"] = job(arguments("one-interrupted", MODES[1]), 1, **stop)
    jobs["resumed"] = Job(
        ["fit", "--resume", str(folder / "one-interrupted" / "001")], num_ranks=1, after="one-interrupted"
    )
    return Finished(jobs, folder)


def run_dir(finished: Finished, name: str) -> Path:
    if name != "one-interrupted":
        return finished.run_dir(name)
    finished.ended(name, [130])
    finished.ended("resumed", [0])
    return finished.folder / name / "001"


@pytest.mark.parametrize(("number", "mode"), samples(WAYS))
def test_offload_changes_nothing(finished: Finished, number: str, mode: str) -> None:
    parked, plain = run_dir(finished, f"{number}-{mode}"), run_dir(finished, f"{number}-none")

    assert_same_run(parked, plain)
    last, expected = last_checkpoint(parked), last_checkpoint(plain)
    assert last.keys() == expected.keys()
    assert all(torch.equal(last[name], expected[name]) for name in expected)


@pytest.mark.parametrize("mode", samples(("none", *MODES), MODES[1]))
def test_all_of_it_was_parked(finished: Finished, mode: str) -> None:
    """From the second step on, when both optimizers have stepped at least in part."""
    folder = run_dir(finished, f"one-{mode}")
    rows = read_metrics(folder / "metrics.jsonl")
    if mode == "none":
        assert not any(name.startswith("offload/") for name in rows[0])
        return
    tensors = {name: tensor for name, tensor in last_checkpoint(folder).items() if tensor.is_floating_point()}
    of_state = sum(tensor.nbytes for name, tensor in tensors.items() if "'state'" in name)
    weights = {name: tensor.nbytes for name, tensor in tensors.items() if "state_dict" in name}
    reference = {name: size for name, size in weights.items() if "policy." in name}
    expected = of_state + (sum(weights.values()) + sum(reference.values()) if mode == MODES[1] else 0)
    assert rows[-1]["offload/gib"] * (1 << 30) == pytest.approx(expected, rel=1e-6)
    assert rows[-1]["offload/seconds"] > 0
