"""The driver: the order in which it starts tasks, and what it does when one of them, or it itself, is killed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked import ForkedProcess
from processes import runs, wait_until_gone
from rlplug_engines.servers.server_list import FILE_VARIABLE, ListedServer, key_of_server, read_server_list
from rlplug_launch.launcher import TaskNeeds
from rlplug_launch.slurm import Slurm
from rlplug_launch.state import LaunchState, ask_to_stop

pytestmark = pytest.mark.kit

SCRIPT = Path(__file__).with_name("driver_case.py")
CHECKPOINT = "checkpoints/step-00000001"
NEWER = "checkpoints/step-00000002"


class Case:
    """A driver in a process of its own."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None, **options: Any) -> None:
        folder.mkdir()
        self.folder, self.run_folder = folder, folder / "run"
        command = [sys.executable, SCRIPT, folder, json.dumps(options)]
        self.driver = ForkedProcess(command, env={**os.environ, **(environment or {})}, output=folder / "output")

    def wait_for(self, what: str, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 60
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what}: {self.driver.stdout}"
            assert self.driver.poll() is None, f"{what}: {self.driver.stdout}"
            time.sleep(0.05)
        return found

    def trainer(self, attempt: int = 0, name: str = "trainer") -> dict[str, Any]:
        """Return what the trainer of an attempt has written, waiting for it; that of another node is a ``peer``."""
        file = self.folder / f"{name}-{attempt}.json"
        self.wait_for(f"{name} {attempt}", file.exists)
        return dict(json.loads(file.read_text()))

    def servers(self) -> dict[int, int]:
        """Return the process of each server that runs, by its port."""
        files = list(self.folder.glob("server-*.running"))
        return {int(file.stem.partition("-")[2]): int(file.read_text()) for file in files if file.read_text()}

    def end(self) -> int:
        """Return the driver's exit status, once it has ended and nothing is left behind."""
        code = self.driver.wait(60)
        self.nothing_is_left()
        return code

    def nothing_is_left(self) -> None:
        """Wait until no process of the run is there."""
        for process in psutil.process_iter(["cmdline"]):
            if f"{self.folder}/" in " ".join(process.info["cmdline"] or []):
                wait_until_gone(process.pid)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    """Drivers that all start at once, since each waits for processes most of the time."""
    folder = tmp_path_factory.mktemp("drivers")
    options: dict[str, dict[str, Any]] = {
        "finishes": {},
        "trainer killed": {"make": [CHECKPOINT]},
        "resumed": {"make": [CHECKPOINT, NEWER], "checkpoint": CHECKPOINT, "servers": 1, "max_restarts": 2},
        "server killed": {},
        "server hangs": {"hanging": True},
        "node lost": {"losing": True},
        "lost at the start": {"losing": True, "make": ["../lost"]},
        "last node lost": {"losing": True, "servers": 1},
        "driver killed": {},
        "terminated": {},
        "stopped": {"servers": 1, "make": [CHECKPOINT]},
        "wrong": {"behaviour": "wrong", "servers": 1},
        "fails": {"behaviour": "fails", "servers": 1},
        "unhealthy": {"unhealthy": True, "max_restarts": 0, "servers": 1},
    }
    made = {name: Case(folder / name.replace(" ", "-"), **its) for name, its in options.items()}
    yield made
    for case in made.values():
        case.driver.kill()


def test_servers_are_ready_before_the_trainer_starts_and_end_after_it(cases: dict[str, Case]) -> None:
    case = cases["finishes"]
    seen = case.trainer()
    ports = case.servers()
    arguments, environment = seen["arguments"], seen["environment"]
    urls = json.loads(arguments[arguments.index("--model.rollout.init_args.urls") + 1])
    assert sorted(urls) == sorted(f"http://127.0.0.1:{port}" for port in ports)
    assert arguments[1:4] == ["-m", "rlplug", "fit"]
    assert arguments[arguments.index("--trainer.devices") + 1] == "2"
    assert environment["RLPLUG_RUN_FOLDER"] == str(case.run_folder)
    for port, pid in ports.items():
        key = Path(f"/proc/{pid}/environ").read_bytes().split(b"A_KEY=")[1].split(b"\0")[0]
        assert key.decode() == key_of_server(environment["A_KEY"], ListedServer(f"http://127.0.0.1:{port}", 0))
    (case.folder / "finish").touch()

    assert case.end() == 0
    assert LaunchState.read(case.run_folder).status == "finished"
    assert not case.servers()
    assert not runs(seen["rank"])
    assert "[trainer 0 " in case.driver.stdout
    assert "a line of the trainer" in (case.run_folder / "launch/trainer-0.log").read_text()


def test_killed_trainer_starts_again_from_its_checkpoint(cases: dict[str, Case]) -> None:
    case = cases["trainer killed"]
    seen, servers = case.trainer(), case.servers()
    killed_at = time.monotonic()
    os.kill(seen["pid"], signal.SIGKILL)
    again = case.trainer(1)
    assert time.monotonic() - killed_at < 30
    assert again["environment"]["A_KEY"] != seen["environment"]["A_KEY"]  # at a fixed port, URLs are the same
    assert not any(map(runs, [seen["rank"], *servers.values()]))
    assert again["arguments"][3:8] == ["fit", "--resume", str(case.run_folder), "--ckpt_path", "newest-whole"]
    (case.folder / "finish").touch()

    assert case.end() == 0
    output = case.driver.stdout
    assert "fault: trainer 0 on " in output
    assert "was ended by SIGKILL; the end of " in output
    assert "restart 1 of launch.max_restarts 1" in output


@pytest.mark.nightly
def test_resumed_run_starts_again_as_it_was_told_until_it_has_written_a_checkpoint(cases: dict[str, Case]) -> None:
    """It catches a restart with the newest checkpoint and the former run's options, in place of those given now."""
    case = cases["resumed"]
    config_file = str(case.run_folder / "launch/config.yaml")
    told = ["fit", "--config", config_file, "--ckpt_path", str(case.run_folder / CHECKPOINT)]
    for attempt in (0, 1):
        seen = case.trainer(attempt)
        assert seen["arguments"][3:8] == told
        if attempt == 1:  # the first step sets the newer one aside, and that step is saved again
            (case.run_folder / NEWER).rename(case.folder / "abandoned")
            (case.run_folder / NEWER).mkdir()
        os.kill(seen["pid"], signal.SIGKILL)
    seen = case.trainer(2)
    assert seen["arguments"][3:8] == ["fit", "--resume", str(case.run_folder), "--ckpt_path", "newest-whole"]
    (case.folder / "finish").touch()
    assert case.end() == 0


@pytest.mark.nightly
def test_attempt_that_saved_nothing_leaves_its_rows_aside(tmp_path: Path) -> None:
    case = Case(tmp_path / "case", make=["tensorboard"], servers=1)
    seen = case.trainer()
    (case.run_folder / "metrics.jsonl").write_text('{"step": 1}\n')
    os.kill(seen["pid"], signal.SIGKILL)
    again = case.trainer(1)
    assert "--resume" not in again["arguments"]
    assert [path.name for path in case.run_folder.iterdir()] == ["launch"]
    assert (case.run_folder / "launch/without-checkpoint-1/metrics.jsonl").read_text() == '{"step": 1}\n'
    (case.folder / "finish").touch()
    assert case.end() == 0


def test_killed_server_starts_again_at_another_port_beside_the_same_trainer(cases: dict[str, Case]) -> None:
    """At its own port, requests of before would reach a server without the weights."""
    case = cases["server killed"]
    seen, before = case.trainer(), case.servers()
    file = Path(seen["environment"][FILE_VARIABLE])
    listed = [server.url for server in read_server_list(file)]
    assert sorted(listed) == sorted(f"http://127.0.0.1:{port}" for port in before)
    port = min(before)
    os.kill(before[port], signal.SIGKILL)
    case.wait_for(
        "the rest", lambda: [server.url for server in read_server_list(file)] == [f"http://127.0.0.1:{max(before)}"]
    )
    case.wait_for("both", lambda: len(read_server_list(file)) == 2)
    assert runs(seen["pid"])
    new = {int(server.url.rpartition(":")[2]) for server in read_server_list(file)}
    assert port not in new
    assert max(before) in new
    case.wait_for("health", lambda: [t.state for t in LaunchState.read(case.run_folder).tasks][1:] == ["healthy"] * 2)
    (case.folder / "finish").touch()

    assert case.end() == 0
    assert not (case.folder / "trainer-1.json").exists()


def test_server_that_hangs_is_shown_as_silent_and_starts_again(cases: dict[str, Case]) -> None:
    """Alone catches a server that stays healthy for ever because it once answered, and one that stays silent."""
    case = cases["server hangs"]
    case.trainer()
    before = case.servers()

    def states() -> list[str]:
        return [task.state for task in LaunchState.read(case.run_folder).tasks][1:]

    first, second = (case.folder / f"server-{port}.hangs" for port in before)
    second.touch()
    case.wait_for("silence", lambda: "silent" in states())
    second.unlink()
    case.wait_for("its answer", lambda: states() == ["healthy"] * 2)
    assert set(case.servers()) == set(before)
    first.touch()
    case.wait_for("another", lambda: set(case.servers()) - set(before) and states() == ["healthy"] * 2)
    (case.folder / "finish").touch()
    assert case.end() == 0
    assert not (case.folder / "trainer-1.json").exists()


@pytest.mark.nightly
def test_server_of_a_lost_node_starts_elsewhere_beside_the_same_trainer(cases: dict[str, Case]) -> None:
    case = cases["node lost"]
    file = Path(case.trainer()["environment"][FILE_VARIABLE])
    before = read_server_list(file)
    (case.folder / "lost").touch()
    case.wait_for("the rest", lambda: len(read_server_list(file)) == 1)
    (rest,) = read_server_list(file)
    assert rest in before
    case.wait_for("the state", lambda: LaunchState.read(case.run_folder).tasks[1].state == "lost")
    (case.folder / "room").touch()
    case.wait_for("another", lambda: len(read_server_list(file)) == 2)
    assert set(read_server_list(file)) - {rest} != set(before) - {rest}
    (case.folder / "finish").touch()

    assert case.end() == 0
    assert "server 0 starts again on elsewhere" in case.driver.stdout
    assert not (case.folder / "trainer-1.json").exists()


def test_server_that_is_lost_at_the_start_does_not_keep_the_trainer_waiting(cases: dict[str, Case]) -> None:
    """It catches a launch that waits for ever: a lost server has no deadline."""
    case = cases["lost at the start"]
    file = Path(case.trainer()["environment"][FILE_VARIABLE])
    assert len(read_server_list(file)) == 1
    states = ["running", "lost", "healthy"]
    case.wait_for("states", lambda: [task.state for task in LaunchState.read(case.run_folder).tasks] == states)
    (case.folder / "finish").touch()
    assert case.end() == 0


@pytest.mark.nightly
def test_loss_of_the_last_server_restarts_the_run(cases: dict[str, Case]) -> None:
    case = cases["last node lost"]
    case.trainer()
    (case.folder / "lost").touch()
    case.wait_for("a fault", lambda: "was lost with its node" in case.driver.stdout)
    (case.folder / "lost").unlink()
    case.trainer(1)
    (case.folder / "finish").touch()
    assert case.end() == 0


def test_nothing_is_left_when_the_driver_is_killed(cases: dict[str, Case]) -> None:
    case = cases["driver killed"]
    seen, servers = case.trainer(), case.servers()
    os.kill(case.driver.pid, signal.SIGKILL)
    for pid in (seen["pid"], seen["rank"], *servers.values()):
        wait_until_gone(pid)
    assert (case.folder / "saved").exists(), "the trainer had its grace time"


@pytest.mark.parametrize("how", ["terminated", "stopped"])
def test_the_trainer_saves_while_its_servers_run(cases: dict[str, Case], how: str) -> None:
    case = cases[how]
    case.trainer()
    if how == "terminated":
        os.kill(case.driver.pid, signal.SIGTERM)
    else:
        assert ask_to_stop(case.run_folder, 60).status == "stopped"

    assert case.end() == 143
    assert len((case.folder / "saved").read_text().split()) == (2 if how == "terminated" else 1)
    hint = f"rlplug launch --resume {case.run_folder}" if how == "stopped" else "nothing to save"
    assert hint in LaunchState.read(case.run_folder).message


@pytest.mark.parametrize(("name", "attempts"), [("wrong", 1), ("fails", 2)])
def test_run_fails_at_once_for_a_wrong_configuration_and_else_after_its_restarts(
    cases: dict[str, Case], name: str, attempts: int
) -> None:
    case = cases[name]
    assert case.end() == 1
    assert len(list(case.folder.glob("trainer-*.json"))) == attempts
    assert f"ended with status {2 if name == 'wrong' else 1}" in LaunchState.read(case.run_folder).message
    assert name == "wrong" or "the last words" in LaunchState.read(case.run_folder).message


def test_server_that_does_not_become_healthy_is_named_with_its_log(cases: dict[str, Case]) -> None:
    case = cases["unhealthy"]
    assert case.end() == 1
    message = LaunchState.read(case.run_folder).message
    assert "server 0 on " in message
    assert "launch.servers.start_deadline_s 5 s" in message
    assert "loading for ever" in message
    assert not (case.folder / "trainer-0.json").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["trainer", "server", "driver"])
def test_a_kill_at_any_time_ends_as_promised(tmp_path: Path, victim: str) -> None:
    """Ten runs, each killed after a random time from its first sight of the victim: also while others still start."""
    chosen = random.Random(victim)
    waits = [chosen.uniform(0.0, 3.0) for _ in range(10)]
    for first in range(0, len(waits), 5):
        cases = [Case(tmp_path / f"{index}", make=[CHECKPOINT], servers=1) for index in range(first, first + 5)]
        for case, wait_s in zip(cases, waits[first:], strict=False):
            pid = case.driver.pid
            if victim == "trainer":
                pid = case.trainer()["pid"]
            elif victim == "server":
                (pid,) = case.wait_for(victim, case.servers).values()
            time.sleep(wait_s)
            os.kill(pid, signal.SIGKILL)
        for case in cases:
            if victim == "driver":
                case.nothing_is_left()
                continue
            if victim == "trainer":
                assert "--resume" in case.trainer(1)["arguments"]
            else:
                case.trainer()
            (case.folder / "finish").touch()
            assert case.end() == 0, case.driver.stdout
            assert (case.folder / "trainer-1.json").exists() == (victim == "trainer")


@pytest.fixture(scope="module", params=[1])
def allocation(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """A job of SLURM without a process, which outlives drivers: what is left of them would be left in it."""
    if shutil.which("salloc") is None or subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        pytest.skip("needs a SLURM that runs here: Debian's slurmctld, slurmd and munge")
    command = ["salloc", "--no-shell", f"--nodes={request.param}", "--exclusive"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "Node count specification invalid" in done.stderr or "More processors" in done.stderr:
        pytest.skip(f"this SLURM has less than {request.param} nodes")
    assert done.returncode == 0, done.stderr
    job = re.findall(r"allocation (\d+)", done.stderr)[0]
    listed = ["squeue", "--noheader", "--jobs", job, "--format=%N"]
    nodes = subprocess.run(listed, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    yield {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": nodes}
    subprocess.run(["scancel", job], timeout=60, check=True)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["none", "trainer", "server", "driver", "terminated"])
def test_faults_inside_an_allocation_of_slurm(tmp_path: Path, allocation: dict[str, str], victim: str) -> None:
    case = Case(tmp_path / "case", allocation, slurm=True, make=[CHECKPOINT], servers=1)
    seen = case.trainer()
    ((port, server),) = case.servers().items()
    pids = {"trainer": seen["pid"], "server": server, "driver": case.driver.pid}
    if victim in pids:
        os.kill(pids[victim], signal.SIGKILL)
    if victim == "driver":
        case.nothing_is_left()
        return
    if victim == "terminated":
        os.kill(case.driver.pid, signal.SIGTERM)
        assert case.end() == 143
        assert (case.folder / "saved").read_text() == f"server-{port}.running"
        return
    if victim == "trainer":
        assert "--resume" in case.trainer(1)["arguments"]
    if victim == "server":
        case.wait_for("the server", lambda: len(case.servers()) == 2)  # the killed one has left its file
    (case.folder / "finish").touch()
    assert case.end() == 0, case.driver.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("allocation", [3], indirect=True)
@pytest.mark.parametrize("victim", ["none", "peer", "server", "driver", "terminated"])
def test_faults_on_several_nodes_of_slurm(tmp_path: Path, allocation: dict[str, str], victim: str) -> None:
    """Two nodes of the trainer, and a third one in the job; both servers are on the first node."""
    case = Case(tmp_path / "case", allocation, slurm=True, make=[CHECKPOINT], nodes=2)
    seen, peer, servers = case.trainer(), case.trainer(name="peer"), case.servers()
    assert seen["host"] != peer["host"]
    assert (seen["environment"]["NODE_RANK"], peer["environment"]["NODE_RANK"]) == ("0", "1")
    for name in ("MASTER_ADDR", "MASTER_PORT", FILE_VARIABLE):
        assert seen["environment"][name] == peer["environment"][name]
    assert not seen["environment"]["MASTER_ADDR"].startswith("127.")
    if victim == "driver":
        os.kill(case.driver.pid, signal.SIGKILL)
        case.nothing_is_left()
        return
    if victim == "terminated":
        os.kill(case.driver.pid, signal.SIGTERM)
        assert case.end() == 143
        assert len((case.folder / "saved").read_text().split()) == 2
        return
    if victim == "peer":
        os.kill(peer["pid"], signal.SIGKILL)
        assert "--resume" in case.trainer(1)["arguments"]
        assert "--resume" in case.trainer(1, "peer")["arguments"]
    if victim == "server":
        os.kill(servers[min(servers)], signal.SIGKILL)
        case.wait_for("the server", lambda: len(case.servers()) == 3)  # the killed one has left its file
    (case.folder / "finish").touch()
    assert case.end() == 0, case.driver.stdout


@pytest.mark.nightly
def test_batch_script_is_one_that_sbatch_takes(allocation: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    script = Slurm(nodes=1).batch_script([TaskNeeds("trainer 0", 0, own_node=True)], ["true"], 120.0)
    command = ["sbatch", "--test-only"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
