"""Servers as processes: their environment, their log, and their end."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from rlplug.errors import RunError
from rlplug.rollout.servers.http_client import HTTPClient
from rlplug.rollout.servers.processes import Launch, ServerProcesses, ServerSlot, wait_until_healthy

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


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_servers_become_healthy_and_end_with_close(client: HTTPClient) -> None:
    servers = ServerProcesses("Tiny", launch_tiny, [None, None])
    wait_until_healthy("Tiny", client, servers.urls, 60.0, servers)
    assert servers.problem() == ""
    pids = [server.supervisor.pid for server in servers._servers]
    pids += [child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    assert len(pids) == 4
    servers.close()
    assert not any(map(is_running, pids))


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


def test_end_of_the_log_says_why_a_server_is_gone(client: HTTPClient) -> None:
    code = "print('a long story'); print('noise: nothing'); raise SystemExit(7)"
    servers = ServerProcesses("Tiny", lambda _: Launch(python(code), {}), [None], noise=("noise:",))
    with pytest.raises(RunError, match=r"(?s)Tiny did not start\..*status 7.*server-0\.log.*a long story") as error:
        wait_until_healthy("Tiny", client, servers.urls, 60.0, servers)
    assert "noise:" not in str(error.value)
    servers.close()


def test_server_that_never_answers_is_named(client: HTTPClient) -> None:
    servers = ServerProcesses("Tiny", lambda _: Launch(python("import time; time.sleep(60)"), {}), [None])
    with pytest.raises(RunError, match=r"not healthy after rollout\.start_deadline_s 0\.5 s\. Log: .*server-0"):
        wait_until_healthy("Tiny", client, servers.urls, 0.5, servers)
    servers.close()


def test_folder_is_readable_by_this_user_alone() -> None:
    slots: list[ServerSlot] = []

    def launch(slot: ServerSlot) -> Launch:
        slots.append(slot)
        return Launch(python("pass"), {})

    servers = ServerProcesses("Tiny", launch, [None, None])
    servers.close()
    assert stat.S_IMODE(os.stat(slots[0].folder).st_mode) == 0o700
    assert slots[0].key == slots[1].key == servers.key
    assert len(servers.key) == 64
    assert slots[0].port != slots[1].port


def test_processes_of_a_server_end_when_the_trainer_is_killed(tmp_path: Path) -> None:
    """Also one that ignores SIGTERM, and one that its server started."""
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
        from rlplug.rollout.servers.processes import Launch, ServerProcesses
        servers = ServerProcesses("Tiny", lambda _: Launch([sys.executable, {str(script)!r}], {{}}), [None])
        time.sleep(600)
    """
    process = subprocess.Popen(python(trainer))
    pids = [int(pid) for pid in wait_for(file).split()]
    assert all(map(is_running, pids))
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(map(is_running, pids))
