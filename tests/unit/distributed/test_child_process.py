"""How child processes end, and what of their logs is quoted."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import runs, wait_until_gone

from rlplug.distributed.child_process import ChildProcess, ending, tail

PARENT = "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', {child!r}]); "
SAYS = "print(child.pid, flush=True); {rest}"


def start(child: str, rest: str) -> tuple[ChildProcess, int]:
    """Start a process that starts another one, and return both."""
    code = PARENT.format(child=child) + SAYS.format(rest=rest)
    process = ChildProcess([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.parametrize(("rest", "status"), [("sys.exit(3)", 3), ("time.sleep(600)", -9)])
def test_what_a_process_started_ends_with_it(rest: str, status: int) -> None:
    """Alone catches a kill of the first process only, and a status that the kill of the others replaces."""
    process, child = start("import time; time.sleep(600)", rest)
    began = time.monotonic()
    assert process.end(grace_s=0.5, gone_s=10.0) == status
    assert time.monotonic() - began < 8.0
    wait_until_gone(child)
    assert process.end() == status


def test_a_process_may_end_by_itself_in_its_time(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    code = "import sys, time; print('out', sys.stdin.read()); sys.stdout.flush(); time.sleep(0.2); sys.exit('err')"
    process = ChildProcess([sys.executable, "-c", code], log)
    assert process.end(grace_s=60.0) == 1
    assert log.read_text() == "before\nout \nerr\n"
    assert not runs(process.pid)


@pytest.mark.parametrize(
    ("status", "said"),
    [(3, "ended with status 3"), (-9, "was ended by SIGKILL"), (143, "was ended by SIGTERM"), (255, "with status 255")],
)
def test_an_exit_status_is_named(status: int, said: str) -> None:
    assert said in ending(status)


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == "(no log: No such file or directory)"
    log.write_bytes(b"x" * 100_000 + b"\n" + b"".join(b"%d\n\n" % n for n in range(100)) + b"noise\n\xff end")
    assert tail(log, 3, ("noise",)) == "98\n99\n\ufffd end"
