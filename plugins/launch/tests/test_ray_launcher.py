"""The launcher on Ray: its messages without Ray, and a run on two Ray nodes of this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import psutil
import pytest
import yaml
from doc_engine import ROOT, write_engine
from processes import wait_until_gone
from rlplug_launch.launcher import TaskNeeds
from rlplug_launch.ray import Ray
from rlplug_launch.ray.agent import Agent

from rlplug.errors import ConfigError, RunError
from rlplug.observability.metrics_log import read_metrics

CLUSTER = """
    import sys
    from ray.cluster_utils import Cluster
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(4)]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        (node,) = [node for node in nodes if node.node_id.startswith(line.strip())]
        node.kill_raylet()
        print("killed", flush=True)
    cluster.shutdown()
"""
OPTIONS = [
    *("-c", "configs/quickstart.yaml", "--model.policy.path", "tests/model", "--model.rollout"),
    *("launched_engine.LaunchedRollout", "--model.batch.prompts_per_step", "4"),
    *("--model.batch.group_size", "4", "--model.validation.at_start", "false"),
    *("--model.validation.every_n_steps", "null", "--run.report", "false", "--checkpoint.every_n_steps", "1"),
]


def test_missing_ray_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'rlplug-launch\[ray\]'"):
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


def test_a_place_that_is_lost_before_its_agent_starts_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when Ray learns later than the launcher that the node has gone, and sends the new agent there."""

    class ActorError(Exception):
        actor_init_failed = False

    def fail(_: object) -> None:
        raise problem

    problem, ended = ActorError("the actor never ran"), []
    ray = SimpleNamespace(
        exceptions=SimpleNamespace(RayError=Exception, RayActorError=ActorError),
        wait=lambda calls, timeout: (calls, []),
        get=fail,
        kill=ended.append,
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    agents = [SimpleNamespace(enter=SimpleNamespace(remote=object)) for _ in range(2)]
    launcher = Ray()
    monkeypatch.setattr(launcher, "_new_agent", lambda index: agents[len(ended)])
    assert launcher.replace(0) is None
    problem.actor_init_failed = True
    with pytest.raises(RunError, match="Ray cannot start it: the actor never ran"):
        launcher.replace(0)
    assert ended == agents


@dataclass
class Cluster:
    """A Ray cluster on this machine."""

    address: str
    process: subprocess.Popen[str]

    def lose(self, node: str) -> None:
        """Kill the raylet of a node that the launcher named."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(node.partition("/")[2], file=self.process.stdin, flush=True)
        assert self.process.stdout.readline().strip() == "killed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def environment(folder: Path) -> dict[str, str]:
    """That of the nodes, whose processes import the engine, and of the driver."""
    path = os.pathsep.join([str(folder / "engine"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def cluster(environment: dict[str, str]) -> Iterator[Cluster]:
    """One with a node for each task, the driver's aside."""
    pytest.importorskip("ray", reason="`make test-all` installs Ray")
    command, pipe = [sys.executable, "-c", textwrap.dedent(CLUSTER)], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Cluster(process.stdout.readline().strip(), process)
        process.stdin.close()


@pytest.mark.nightly
def test_a_run_on_two_nodes_survives_the_loss_of_a_trainer(
    folder: Path, cluster: Cluster, environment: dict[str, str]
) -> None:
    runs = folder / "runs"
    options = ["--trainer.num_nodes", "2", "--model.num_steps", "4"]
    with launched(folder, cluster, environment, runs, options) as driver:
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
    assert [row["step"] for row in read_metrics(run_folder / "metrics.jsonl")] == [1, 2, 3, 4]
    nothing_is_left(runs)


@pytest.mark.nightly
def test_a_run_goes_on_without_the_node_of_a_server_which_starts_elsewhere(
    folder: Path, cluster: Cluster, environment: dict[str, str]
) -> None:
    runs = folder / "server-runs"
    options = ["--trainer.num_nodes", "1", "--model.num_steps", "100000"]
    with launched(folder, cluster, environment, runs, options) as driver:
        assert driver.stdout is not None
        output = read_until(driver.stdout, r"step \d+/")
        tasks = json.loads((runs / "001/launch/state.json").read_text())["tasks"]
        nodes = [task["node"] for task in tasks]
        assert len(set(nodes)) == 3
        cluster.lose(nodes[1])
        output += read_until(driver.stdout, f"server 0 on {nodes[1]} was lost with its node")
        output += read_until(driver.stdout, r"now runs on http\S+, http")
        (moved,) = re.findall(r"server 0 starts again on (\S+),", output)
        assert moved not in nodes
        output += read_until(driver.stdout, "step ")
        driver.send_signal(signal.SIGTERM)
        output += driver.stdout.read()
    assert driver.returncode == 143, output
    assert "fault:" not in output
    steps = [row["step"] for row in read_metrics(runs / "001/metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    nothing_is_left(runs)


@contextmanager
def launched(
    folder: Path, cluster: Cluster, environment: dict[str, str], runs: Path, options: list[str]
) -> Iterator[subprocess.Popen[str]]:
    """Yield the driver of a run with two servers."""
    server = write_engine(folder / "engine", ROOT / "tests/model")
    launch = {"launch": {"servers": {"command": server, "count": 2, "gpus": 0}, "grace_s": 30}}
    (folder / "launch.yaml").write_text(yaml.safe_dump(launch))
    line = [sys.executable, "-m", "rlplug", "launch", "--launcher", "ray", "-c", str(folder / "launch.yaml"), *OPTIONS]
    line += [*options, "--run.dir", str(runs)]
    own = environment | {"RAY_ADDRESS": cluster.address}
    with subprocess.Popen(line, cwd=ROOT, env=own, stdout=subprocess.PIPE, text=True) as driver:
        try:
            yield driver
        except BaseException:
            driver.kill()  # nobody waits for the end of a run that failed an assertion
            raise


def nothing_is_left(runs: Path) -> None:
    """Wait until the processes of a run are gone."""
    for process in psutil.process_iter(["cmdline"]):
        if str(runs) in " ".join(process.info["cmdline"] or []):
            wait_until_gone(process.pid)


def read_until(stream: IO[str], pattern: str) -> str:
    output = ""
    for line in stream:
        output += line
        if re.search(pattern, line):
            return output
    raise AssertionError(output)


def is_rank(process: psutil.Process, run_folder: Path) -> bool:
    words = process.info["cmdline"] or []
    return "fit" in words[:4] and str(run_folder) in " ".join(words)
