"""What a node lacks, how nodes are divided among tasks, and which plans are refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rlplug_launch import node, probe
from rlplug_launch.checks import check_nodes
from rlplug_launch.config import LaunchConfig, ServersConfig
from rlplug_launch.launcher import Launcher, Place, RunningTask, TaskNeeds
from rlplug_launch.plan import make_plan
from rlplug_launch.processes import FreeNode, divide
from rlplug_launch.slurm import Slurm
from rlplug_launch.state import LaunchState

from rlplug.errors import ConfigError, RunError

TASKS = [TaskNeeds("trainer 0", 2, own_node=True), TaskNeeds("server 0", 1), TaskNeeds("server 1", 1)]
PLACES = [Place("a", "127.0.0.1", (0, 1)), Place("b", "127.0.0.1", (0,)), Place("b", "127.0.0.1", (1,))]


class Answers(Launcher):
    """A launcher whose nodes answer as a test says, over what a probe of this host answers."""

    def __init__(self, changes: Mapping[str, Any]) -> None:
        self.changes = changes

    def place(self, tasks: Sequence[TaskNeeds]) -> list[Place]:
        return PLACES

    def call(self, index: int, command: Sequence[str], timeout_s: float) -> str:
        if "error" in self.changes and index:
            raise RunError(self.changes["error"])
        found = probe.answer(json.loads(command[-1])) | {"gpus": 2}
        return json.dumps(found | (self.changes if index else {}))

    def start(self, *_: Any, **__: Any) -> RunningTask:
        raise AssertionError


def test_nodes_that_have_everything_get_a_port_for_each_task() -> None:
    ports = check_nodes(Answers({}), TASKS, PLACES, ["."], [0, 0, 29_999])
    assert len(set(ports)) == 3
    assert ports[2] == 29_999


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 1}, r"^b: too few GPUs: it has 1, and its tasks take 2\."),
        ({"missing": ["runs/x"], "folder": "/home"}, r"^b: runs/x is not there \(in /home\): .*all nodes share"),
        ({"used_ports": [8000]}, r"^b: port 8000 of 127\.0\.0\.1 is in use: .*launch\.servers\.port"),
        ({"free_ports": []}, r"^b: its address 127\.0\.0\.1 is not one of its own"),
        ({"time": time.time() - 3600}, r"^b: its clock is \d{4,} s off"),
        ({"versions": {}}, r"^b: torch is not installed there and .* here"),
        ({"error": "no such host"}, r"^b: no such host"),
    ],
)
def test_what_a_node_lacks_is_said_with_its_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?m){message}") as error:
        check_nodes(Answers(changes), TASKS, PLACES, ["."], [0, 0, 0])
    assert "\na: " not in str(error.value)


def test_a_port_on_which_somebody_listens_is_in_use() -> None:
    (port,) = probe.free_ports("127.0.0.1", 1)
    assert not probe.is_used("127.0.0.1", port)
    with subprocess.Popen([sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]) as server:
        deadline = time.monotonic() + 30
        while not probe.is_used("127.0.0.1", port):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.kill()
    assert probe.is_used("192.0.2.1", port), "an address of another host"


def test_tasks_fill_nodes_in_order_and_trainers_get_one_each() -> None:
    def places(tasks: Sequence[TaskNeeds], *gpus: int) -> list[tuple[str, tuple[int, ...] | None]]:
        nodes = [FreeNode(name, "", list(range(count))) for name, count in zip("abc", gpus, strict=False)]
        return [(place.node, place.gpus) for place in divide(tasks, nodes)]

    assert places(TASKS, 4) == [("a", (0, 1)), ("a", (2,)), ("a", (3,))]
    assert places(TASKS, 2, 2) == [("a", (0, 1)), ("b", (0,)), ("b", (1,))]
    on_cpu = [TaskNeeds("trainer 0", 0, own_node=True), TaskNeeds("trainer 1", 0, own_node=True)]
    assert places(on_cpu, 0, 0) == [("a", ()), ("b", ())]
    with pytest.raises(ConfigError, match=r"no node for trainer 1, which takes 0 GPUs on a node of its own.*a: 0"):
        places(on_cpu, 0)
    with pytest.raises(ConfigError, match=r"no node for server 1, which takes 1 GPUs\. .*a: 0, b: 0"):
        places(TASKS, 2, 1)


def config(**changes: Any) -> dict[str, Any]:
    rollout = {"class_path": "x.VLLMServerRollout", "init_args": {"urls": None, "api_key_env": "A_KEY"}}
    trainer = {"num_nodes": 2, "devices": 8, "accelerator": "gpu"}
    model = {"policy": {"path": "nowhere"}, "rollout": changes.pop("rollout", rollout)}
    return {"trainer": trainer | changes, "model": model}


def servers(command: str = "serve {host}:{port} '{\"a\": 1}'", **changes: Any) -> LaunchConfig:
    return LaunchConfig(servers=ServersConfig(command, **changes))


def test_plan_of_a_configuration() -> None:
    plan = make_plan(config(), servers(count=3, gpus=2, port=8000), has_gpus=True)
    assert [(task.name, task.gpus) for task in plan.tasks()] == [
        *(("trainer 0", 8), ("trainer 1", 8)),
        *(("server 0", 2), ("server 1", 2), ("server 2", 2)),
    ]
    places = [Place(name, f"10.0.0.{name}") for name in "12334"]
    assert plan.wanted_ports(places) == [0, 0, 8000, 8001, 8000]
    assert plan.server_command(places[2], 8000) == ["serve", "10.0.0.3:8000", '{"a": 1}']
    assert make_plan(config(), servers("serve docker/run --port {port} --model podman"), has_gpus=True)
    assert len(plan.key) == 64
    assert plan.key not in repr(plan)


@pytest.mark.parametrize(
    ("changed", "launch", "message"),
    [
        ({"devices": "auto"}, servers(), "trainer.devices is 'auto'"),
        ({"rollout": None}, servers(), "model.rollout is HFRollout, which takes no servers"),
        ({"rollout": {"class_path": "x.A", "init_args": {"urls": ["u"], "api_key_env": "K"}}}, servers(), "both set"),
        ({}, servers("serve --port 1"), r"lacks \{port\}"),
        ({}, servers("serve 'x {port}"), "cannot be read: No closing quotation"),
        ({}, servers("env A=1 docker run --gpus all vllm {port}"), "has docker run, .* start the servers yourself"),
        ({}, servers("bash -c 'exec sudo podman --log-level=debug run vllm {port}'"), "has podman run"),
        ({}, servers(count=0), "launch.servers.count is 0"),
        ({}, servers(health="health"), "launch.servers.health is 'health'"),
    ],
)
def test_plans_that_cannot_work_are_refused(changed: dict[str, Any], launch: LaunchConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(config(**changed), launch, has_gpus=True)


@pytest.mark.parametrize(
    ("indices", "seen", "own"),
    [("0,1", None, "0,1"), ("1", "4,7", "7"), ("", "4,7", ""), ("0", "GPU-1f,GPU-2e", "GPU-1f"), ("", None, "")],
)
def test_a_task_sees_its_own_gpus_alone(indices: str, seen: str | None, own: str) -> None:
    assert node.own_gpus(indices, seen) == own


def test_batch_script_asks_for_the_nodes_that_the_tasks_fill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    slurm = Slurm(gpus_per_node=2, sbatch=["--partition=gpu"])
    script = slurm.batch_script(TASKS, ["python", "-m", "rlplug", "launch", "--run.dir", "a b"], 120.0)
    assert script is not None
    lines = script.splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=2", "#SBATCH --partition=gpu"} <= set(lines)
    assert "#SBATCH --signal=B:TERM@180" in lines
    assert lines[-1] == f"cd {tmp_path} && exec python -m rlplug launch --run.dir 'a b'"
    with pytest.raises(ConfigError, match=r"launch.launcher.gpus_per_node is 1: there is no node for trainer 0"):
        Slurm(gpus_per_node=1).batch_script(TASKS, ["python"], 120.0)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert slurm.batch_script(TASKS, ["python"], 120.0) is None


STATE = {"launcher": "local", "tasks": [{"name": "trainer", "node": "n", "gpus": "0", "address": "a"}]}


@pytest.mark.parametrize(
    "found", [[], 5, {}, STATE | {"tasks": 5}, STATE | {"tasks": [[]]}, STATE | {"updated": "x"}, STATE | {"other": 1},
              STATE | {"status": {}}, STATE | {"pid": []}, STATE | {"tasks": [STATE["tasks"][0] | {"name": 1}]}]
)  # fmt: skip
def test_a_state_of_other_types_is_one_message(tmp_path: Path, found: Any) -> None:
    """Catches a traceback, in ``launch --status`` and ``--stop``, over a folder that somebody else wrote."""
    (tmp_path / "launch").mkdir()
    file = tmp_path / "launch" / "state.json"
    file.write_text(json.dumps(STATE))
    assert LaunchState.read(tmp_path).rows() == [("trainer", "n", "0", "a", "waiting")]
    for text in (json.dumps(found), "[" * 100_000, "\0", "9" * 5000):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"state\.json cannot be read"):
            LaunchState.read(tmp_path)
