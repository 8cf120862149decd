from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlplug_envs.verifiers_environment import VerifiersEnvironment
from rlplug_envs.verifiers_source import VerifiersSource

from rlplug.errors import ConfigError

HERE = Path(__file__).parent


@pytest.mark.parametrize("part", [VerifiersEnvironment, VerifiersSource])
@pytest.mark.parametrize("version", ["0.1.14", "0.4.0"])
def test_other_versions_of_verifiers_are_refused_by_name(version, part, tmp_path, monkeypatch):
    metadata = tmp_path / f"verifiers-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError, match=rf"{part.__name__} runs with verifiers .*{version} is installed: pip install"
    ):
        part("reverse-text")


def test_without_verifiers_the_error_says_what_to_install():
    try:
        importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        with pytest.raises(ConfigError, match=r"pip install 'rlplug-envs\[verifiers\]'"):
            VerifiersEnvironment("reverse-text")
    else:
        pytest.skip("the package verifiers is installed")


TRAINER = """
import os, sys, time
from rlplug_envs.processes import HostPool, host_settings
pool = HostPool(host_settings("Test", "verifiers-cases", {"kind": "tidy", "marker": sys.argv[2]}, True, 300.0, 60.0), 2)
one, other = pool.acquire(), pool.acquire()
print("PIDS", one._process.pid, other._process.pid, flush=True)
if sys.argv[1] == "exits":
    sys.exit()
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["exits", "is killed"])
def test_processes_tidy_up_and_end_with_the_trainer(end, tmp_path):
    pytest.importorskip("verifiers", reason="the package verifiers is not installed")
    program = f"import sys; sys.path[:] = {[str(HERE), *sys.path]!r}\n{TRAINER}"
    marker = tmp_path / "tidied"
    trainer = subprocess.Popen([sys.executable, "-c", program, end, marker], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    with trainer.stdout as lines:
        pids = [int(pid) for pid in next(line for line in lines if line.startswith("PIDS")).split()[1:]]
        assert len(set(pids)) == 2
        if end == "is killed":
            assert all(map(is_running, pids))
            trainer.kill()
        trainer.wait(timeout=60)
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, pids))
    assert {path.name for path in tmp_path.iterdir()} == {f"tidied.{pid}" for pid in pids}


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    # one whose parent was killed may stay as a zombie where nothing collects it
    return state != "Z" and os.path.exists(f"/proc/{pid}")
