"""Servers as processes: their environment, their log, and their end."""

from __future__ import annotations

import os
import stat
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from forked import ForkedProcess
from processes import runs
from rlplug_engines.servers.api_processes import APIProcesses
from rlplug_engines.servers.http_client import HTTPClient
from rlplug_engines.servers.processes import Launch, ServerProcesses, ServerSlot, wait_until_healthy

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault

pytestmark = pytest.mark.kit

TINY = Path(__file__).with_name("tiny_server.py")


def launch_tiny(slot: ServerSlot) -> Launch:
    return Launch([sys.executable, str(TINY), str(slot.port)], {})


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return path.read_text()


def test_servers_become_healthy_and_end_with_close(client: HTTPClient) -> None:
    servers = ServerProcesses("Tiny", launch_tiny, [None, None])
    wait_until_healthy("Tiny", client, servers.urls, 60.0, servers)
    assert servers.problem() == ""
    pids = [server.supervisor.pid for server in servers._servers]
    pids += [child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    assert len(pids) == 6
    folders = [server.log.parent for server in servers._servers]
    servers.close()
    assert not any(map(runs, pids))
    assert not any(folder.exists() for folder in folders)


def test_the_busiest_process_that_answers_is_measured(tmp_path: Path) -> None:
    """It catches the time of other processes of the server, such as its idle ones."""
    busy, idle = "while True: sum(range(1000))  # answers", "import time; time.sleep(120)"
    code = f"""
        import subprocess, sys
        children = [subprocess.Popen([sys.executable, "-c", text]) for text in ({busy!r}, {idle!r}, {idle!r})]
        open({str(tmp_path / "started")!r}, "w").write("yes")
        children[0].wait()
    """
    servers = ServerProcesses("Tiny", lambda slot: Launch(python(code), {}), [None])
    try:
        wait_for(tmp_path / "started")
        answering, others = (APIProcesses(servers.pids, [name]) for name in ("# answers", "sleep(120)"))
        time.sleep(1.0)
        assert answering.busiest_share(1.0) > 4 * others.busiest_share(1.0)
    finally:
        servers.close()
    assert answering.busiest_share(1.0) == 0  # they have ended


def test_environment_is_the_trainers_without_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TAKEN_AWAY", "1")
    monkeypatch.setenv("OURS", "here")
    names = ("RANK", "TAKEN_AWAY", "OURS", "ADDED", "CUDA_VISIBLE_DEVICES")
    file = tmp_path / "environment"
    code = f"import os; open({str(file)!r}, 'w').write(repr([os.environ.get(n) for n in {names}]))"
    servers = ServerProcesses(
        "Tiny", lambda _: Launch(python(code), {"ADDED": "new", "TAKEN_AWAY": None}), devices=["2,3"]
    )
    assert wait_for(file) == repr([None, None, "here", "new", "2,3"])
    servers.close()


def test_who_takes_the_port_first_is_not_taken_for_the_server(client: HTTPClient, tmp_path: Path) -> None:
    """Catches a neighbour, who reads the port from the command line, being given the key and the prompts."""
    go = tmp_path / "go"
    code = f"""
        import os, time
        while not os.path.exists({str(go)!r}):
            time.sleep(0.1)
        raise SystemExit("the port is taken")
    """
    servers = ServerProcesses("Tiny", lambda slot: Launch(python(code), {}), [None])
    squatter = ForkedProcess([sys.executable, TINY, servers.urls[0].rpartition(":")[2]])
    try:
        deadline = time.monotonic() + 120
        while not client.is_healthy(servers.urls[0]) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert client.is_healthy(servers.urls[0])
        assert not servers.listens(servers.urls[0])
        go.touch()
        with pytest.raises(RunError, match=r"(?s)Tiny did not start.*the port is taken"):
            wait_until_healthy("Tiny", client, servers.urls, 600.0, servers)
    finally:
        squatter.kill()
        servers.close()


def test_end_of_the_log_says_why_a_server_is_gone(client: HTTPClient) -> None:
    code = "print('a long story'); print('noise: nothing'); raise SystemExit(7)"
    servers = ServerProcesses("Tiny", lambda _: Launch(python(code), {}), [None], noise=("noise:",))
    with pytest.raises(RunError, match=r"(?s)Tiny did not start\..*status 7.*server\.log.*a long story") as error:
        wait_until_healthy("Tiny", client, servers.urls, 60.0, servers)
    assert "noise:" not in str(error.value)
    servers.close()


def test_server_that_never_answers_is_named(client: HTTPClient) -> None:
    servers = ServerProcesses(
        "Tiny", lambda _: Launch(python("import time; print('waits', flush=True); time.sleep(60)"), {}), [None]
    )
    with pytest.raises(RunError, match=r"not healthy after rollout\.start_deadline_s 2 s\. The end of its log:\nwaits"):
        wait_until_healthy("Tiny", client, servers.urls, 2.0, servers)
    with pytest.raises(EngineFault, match="Tiny is waited for no longer: the run is told to stop"):
        wait_until_healthy("Tiny", client, servers.urls, 3600.0, servers, lambda: True)
    servers.close()


def test_folder_is_readable_by_this_user_alone_and_each_server_has_a_key() -> None:
    """Catches a key of all servers, which who takes the port of one that ended would be handed."""
    slots: list[ServerSlot] = []
    modes: list[int] = []

    def launch(slot: ServerSlot) -> Launch:
        slots.append(slot)
        modes.append(stat.S_IMODE(os.stat(slot.folder).st_mode))
        return Launch(python("pass"), {})

    servers = ServerProcesses("Tiny", launch, [None, None])
    keys = servers.keys
    servers.close()
    assert modes == [0o700, 0o700]
    assert [slot.key for slot in slots] == list(keys.values())
    assert len(set(keys.values())) == 2
    assert all(len(key) == 64 for key in keys.values())
    assert slots[0].port != slots[1].port


@pytest.mark.parametrize("killed", ["trainer", "guard", "keeper", "guard and keeper"])
def test_processes_of_a_server_end_when_one_that_watches_it_is_killed(tmp_path: Path, killed: str) -> None:
    """Also one that ignores SIGTERM, and one that its server started; nobody is left to read its log then."""
    file, script = tmp_path / "pids", tmp_path / "server.py"
    script.write_text(
        textwrap.dedent(f"""
            import os, signal, subprocess, sys, time
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            open({str(file)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
            time.sleep(600)
        """)
    )
    trainer = f"""
        import sys, time
        from rlplug_engines.servers.processes import Launch, ServerProcesses
        servers = ServerProcesses("Tiny", lambda _: Launch([sys.executable, {str(script)!r}], {{}}), [None])
        time.sleep(600)
    """
    process = ForkedProcess(python(trainer), env={**os.environ, "TMPDIR": str(tmp_path)})
    server, child = [int(pid) for pid in wait_for(file).split()]
    keeper = psutil.Process(server).parent()
    assert keeper is not None
    guard = keeper.parent()
    assert guard is not None
    assert all(map(runs, (server, child)))
    trainer_process = psutil.Process(process.pid)
    for each in {"trainer": [trainer_process], "guard": [guard], "keeper": [keeper]}.get(killed, [guard, keeper]):
        each.kill()
    watched = [server] if killed == "guard and keeper" else [server, child]  # the rest is up to the engine then
    deadline = time.monotonic() + 30
    while any(map(runs, watched)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(map(runs, watched))
    if killed == "trainer":
        while list(tmp_path.glob("rlplug-server-*")) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not list(tmp_path.glob("rlplug-server-*"))
    process.kill()
    if runs(child):
        os.kill(child, 9)
