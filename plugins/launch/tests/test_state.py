"""What ``--status`` and ``--stop`` say of a driver on another host, whose clock may be any."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from rlplug_launch import state
from rlplug_launch.state import FOLDER, STATE, STOP, LaunchState, ask_to_stop, is_alive

from rlplug.errors import ConfigError


def write(folder: Path, said: LaunchState, updated: float) -> None:
    """Write a state with the clock of another host."""
    partial = folder / FOLDER / "state.partial"
    partial.write_text(json.dumps(asdict(said) | {"updated": updated}))
    partial.replace(folder / FOLDER / STATE)


@pytest.mark.parametrize("ahead_s", [-40.0, 40.0])
def test_a_driver_with_another_clock_is_seen_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """Alone catches a reader that compares its clock with the driver's: 40 s apart, nothing was stopped."""
    monkeypatch.setattr(state, "LOOK_S", 0.05)
    (tmp_path / FOLDER).mkdir()
    said = LaunchState("Slurm", status="running", attempt=1, host="elsewhere")
    write(tmp_path, said, time.time() + ahead_s)

    def drive() -> None:
        for number in itertools.count():
            said.status = "stopped" if (tmp_path / FOLDER / STOP).exists() else "running"
            write(tmp_path, said, time.time() + ahead_s + number)
            if said.has_ended:
                return
            time.sleep(0.1)

    thread = threading.Thread(target=drive, daemon=True)
    thread.start()
    assert is_alive(tmp_path)
    assert ask_to_stop(tmp_path, 60.0).status == "stopped"
    thread.join()
    assert not is_alive(tmp_path)


def test_a_driver_without_signs_of_life_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone catches a driver that seems to run while its clock was ahead, and a wait for one whose end shows."""
    monkeypatch.setattr(state, "LOOK_S", 0.05)
    monkeypatch.setattr(state, "SILENT_S", 1.0)
    (tmp_path / FOLDER).mkdir()
    write(tmp_path, LaunchState("Slurm", status="running", host="elsewhere"), time.time() + 3600)
    assert not is_alive(tmp_path)
    assert ask_to_stop(tmp_path, 60.0).status == "running"
    assert not (tmp_path / FOLDER / STOP).exists()
    assert "has ended without a word" in LaunchState.read(tmp_path).describe(is_alive=False)

    monkeypatch.setattr(state, "SILENT_S", 1e6)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = LaunchState("Local", status="running", host=socket.gethostname(), pid=ended.pid)
    write(tmp_path, here, time.time() + 3600)
    assert not is_alive(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_a_state_that_is_no_text_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """Catches ``launch --status`` that waits for ever at a pipe, or holds a file that takes no room on its disk."""
    file = tmp_path / FOLDER / STATE
    file.parent.mkdir()
    os.mkfifo(file) if kind == "pipe" else [file.touch(), os.truncate(file, 1 << 40)]
    with pytest.raises(ConfigError, match="cannot be read"):
        LaunchState.read(tmp_path)
