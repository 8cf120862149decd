"""The launcher on Ray: its messages without Ray, and a run on two Ray nodes of this machine."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest
import yaml
from doc_engine import ROOT, write_engine
from processes import wait_until_gone
from rlplug_ray import Ray
from rlplug_ray.agent import Agent

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import TaskNeeds

CLUSTER = """
    import sys
    from ray.cluster_utils import Cluster
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()
"""
OPTIONS = [
    *("-c", "configs/quickstart.yaml", "--model.policy.path", "tests/model", "--model.rollout"),
    *("launched_engine.LaunchedRollout", "--trainer.num_nodes", "2", "--model.batch.prompts_per_step", "4"),
    *("--model.batch.group_size", "4", "--model.num_steps", "4", "--model.validation.at_start", "false"),
    *("--model.validation.every_n_steps", "null", "--run.report", "false", "--checkpoint.every_n_steps", "1"),
]


def test_missing_ray_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'rlplug-ray\[ray\]'"):
        Ray().place([TaskNeeds("trainer 0", 1, own_node=True)])


def test_agent_runs_a_task_in_the_drivers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray's own number of threads, which is that of the CPUs that the actor reserves."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir("/")
    agent = Agent(str(tmp_path), None)
    agent.enter()
    code = "import os; print(os.getcwd(), os.environ.get('OMP_NUM_THREADS'), os.environ['A'])"
    agent.start([sys.executable, "-c", code], {"A": "given"}, "log")
    assert agent.wait() == 0
    assert (tmp_path / "log").read_text().split() == [str(tmp_path), "None", "given"]
    with pytest.raises(RunError, match=r"ended with status 3: because"):
        agent.call([sys.executable, "-c", "import sys; print('because', file=sys.stderr); sys.exit(3)"], 60.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def environment(folder: Path) -> dict[str, str]:
    """That of the nodes, whose processes import the engine, and of the driver."""
    path = os.pathsep.join([str(folder / "engine"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def cluster(environment: dict[str, str]) -> Iterator[str]:
    pytest.importorskip("ray", reason="`make test-all` installs Ray")
    command, pipe = [sys.executable, "-c", textwrap.dedent(CLUSTER)], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


@pytest.mark.nightly
def test_a_run_on_two_nodes_survives_the_loss_of_a_trainer(
    folder: Path, cluster: str, environment: dict[str, str]
) -> None:
    server = write_engine(folder / "engine", ROOT / "tests/model")
    launch = {"launch": {"servers": {"command": server, "count": 2, "gpus": 0}, "grace_s": 30}}
    (folder / "launch.yaml").write_text(yaml.safe_dump(launch))
    runs = folder / "runs"
    line = [sys.executable, "-m", "rlplug", "launch", "--launcher", "ray", "-c", str(folder / "launch.yaml"), *OPTIONS]
    line += ["--run.dir", str(runs)]
    own = environment | {"RAY_ADDRESS": cluster}
    with subprocess.Popen(line, cwd=ROOT, env=own, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        output = read_until(driver.stdout, "step 2/4")
        run_folder = runs / "001"
        state = json.loads((run_folder / "launch/state.json").read_text())
        nodes = {task["node"] for task in state["tasks"] if task["name"].startswith("trainer")}
        trainers = [p for p in psutil.process_iter(["cmdline"]) if is_rank(p, run_folder)]
        os.kill(trainers[-1].pid, signal.SIGKILL)
        killed_at = time.monotonic()
        output += read_until(driver.stdout, "all tasks ended within")
        assert time.monotonic() - killed_at < 30
        output += driver.stdout.read()
    assert driver.returncode == 0, output
    assert len(nodes) == 2
    assert "fault: trainer " in output
    with (run_folder / "metrics.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3", "4"]
    for process in psutil.process_iter(["cmdline"]):
        if str(runs.parent) in " ".join(process.info["cmdline"] or []):
            wait_until_gone(process.pid)


def read_until(stream: IO[str], text: str) -> str:
    output = ""
    for line in stream:
        output += line
        if text in line:
            return output
    raise AssertionError(output)


def is_rank(process: psutil.Process, run_folder: Path) -> bool:
    words = process.info["cmdline"] or []
    return "fit" in words[:4] and str(run_folder) in " ".join(words)
