"""Ctrl-C while a run imports its libraries or starts: the process ends at once, with one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import ROOT, SMALL, samples

LIBRARIES = ["libtorch_python", "_multiarray_umath", "_ssl", "_regex", "tokenizers.abi3", "_statistics", "_xxhash"]
"""Shared libraries of what a run imports, in this order."""


def wait_for_library(process: subprocess.Popen[str], name: str) -> None:
    deadline = time.monotonic() + 120
    while name not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None, f"the process ended before it loaded {name}"
        assert time.monotonic() < deadline, f"{name} was not loaded"
        time.sleep(0.02)


@pytest.mark.parametrize("later_s", samples((0.0, 0.3), 0.0))
@pytest.mark.parametrize("library", samples(LIBRARIES, "_multiarray_umath"))
def test_ctrl_c_while_a_library_is_imported_ends_the_run(tmp_path: Path, library: str, later_s: float) -> None:
    """It catches a signal whose exception an import drops, or turns into an error with a traceback."""
    command = [sys.executable, "-m", "rlplug", *SMALL, "--run.dir", str(tmp_path), "--model.num_steps", "1000"]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | path, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for_library(process, library)
            time.sleep(later_s)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert said.count("Ctrl-C: ended; ") == 1
    assert "Traceback" not in said
