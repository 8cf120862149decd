"""Training beside vLLM's servers on the CPU, through the command line: bounds, a dead server, kills and resumes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from asynchronous_metrics import check_bound, metrics_of

pytest.importorskip("vllm", reason="`make test-vllm` installs vLLM")

ROOT = Path(__file__).parents[3]
RUN = [
    *("--config", "configs/quickstart.yaml", "--model.validation.every_n_steps", "null", "--model.num_steps", "12"),
    *("--model.validation.at_start", "false", "--run.report", "false", "--checkpoint.every_n_steps", "2"),
    *("--model.rollout", "VLLMServerRollout", "--model.rollout.kv_cache_gib", "0.25"),
    *("--model.batch.prompts_per_step", "16", "--model.batch.group_size", "4", "--model.algorithm.correction", "{}"),
]
BOUND = 2
ASYNCHRONOUS = [*RUN, "--model.partial_rollout", f"{{asynchronous: true, max_staleness: {BOUND}}}"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def start(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rlplug", "fit", *arguments]
    with log.open("ab") as file:
        return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=file, stderr=file, start_new_session=True)


@pytest.mark.nightly
def test_a_run_that_loses_its_server_and_is_killed_keeps_its_bound(tmp_path):
    """The server dies once; the run is killed three times, at any time, and goes on each time."""
    log, folder, rng = tmp_path / "log", tmp_path / "run" / "001", random.Random(0)
    run = start(log, *ASYNCHRONOUS, "--run.dir", str(folder.parent))
    try:
        wait_until(run, log, lambda: len(metrics_of(folder)) >= 2)
        children = psutil.Process(run.pid).children(recursive=True)
        server = next(each for each in children if each.cmdline()[1:3] == ["-m", "rlplug_rollout_vllm.serve"])
        server.send_signal(signal.SIGKILL)
        for num_steps in (4, 6, 8):
            wait_until(run, log, lambda num_steps=num_steps: len(metrics_of(folder)) >= num_steps)
            time.sleep(rng.uniform(0.0, 1.0))
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            run = start(log, "--resume", str(folder))
        assert run.wait(timeout=300) == 0, log.read_text()[-5000:]
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    check_bound(folder, 12, BOUND, prompts_per_step=16)
    assert "restarts, and" in log.read_text()


def wait_until(run: subprocess.Popen[bytes], log: Path, is_true) -> None:
    ends_at = time.monotonic() + 300
    while not is_true():
        assert run.poll() is None, log.read_text()[-5000:]
        assert time.monotonic() < ends_at, log.read_text()[-5000:]
        time.sleep(0.1)
