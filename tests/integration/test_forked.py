"""The fork server's processes are as those that ``subprocess`` starts: output, exit codes, and an end when asked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import ForkedProcess, free_port, run_forked
from ranks import run_ranks


def python(code: str, timeout: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_forked([sys.executable, "-c", code, "an argument"], env=os.environ | variables, timeout=timeout)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('why')", 1),
        ("raise KeyError", 1),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), 9)", -9),
        ("raise KeyboardInterrupt", -2),
    ],
)
def test_exit_codes_are_those_of_python(ending: str, code: int) -> None:
    assert python(f"import os, sys; {ending}").returncode == code


def test_output_arguments_and_variables_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "print(__name__, sys.argv, os.environ['MINE'], os.getcwd(), sys.path[0])\n"
        "print('wrong', file=sys.stderr)\n"
    )
    command = [sys.executable, "script.py", "1"]
    done = run_forked(command, env=os.environ | {"MINE": "yes"}, cwd=tmp_path, timeout=60)

    assert done.stdout == f"__main__ ['script.py', '1'] yes {tmp_path} {tmp_path}\n"
    assert done.stderr == "wrong\n"
    assert python("import os, sys; print('MINE' in os.environ, sys.argv)").stdout == "False ['-c', 'an argument']\n"


def test_what_runs_at_exit_runs() -> None:
    code = "import atexit, threading, time\natexit.register(print, 'last')\n"
    assert python(code + "threading.Timer(0.2, print, ['thread']).start()").stdout == "thread\nlast\n"


def test_each_draws_numbers_of_its_own() -> None:
    code = "import numpy, random; print(random.random(), numpy.random.rand())"
    drawn = [number for _ in range(2) for number in python(code).stdout.split()]
    assert len(set(drawn)) == 4


def test_a_timeout_ends_the_whole_group(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = f"import subprocess; p = subprocess.Popen(['sleep', '600']); open({str(file)!r}, 'w').write(str(p.pid))"
    with pytest.raises(subprocess.TimeoutExpired):
        python(f"{code}; p.wait()", timeout=5)
    deadline = time.monotonic() + 10
    while is_running(file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(file.read_text())


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_that_was_killed_is_gone() -> None:
    process = ForkedProcess([sys.executable, "-c", "import time; time.sleep(600)"])
    assert process.poll() is None
    process.kill()
    assert process.returncode == -9
    assert not is_running(str(process.pid))


def test_ranks_find_each_other_and_a_failure_shows_what_was_printed(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([1.0 + dist.get_rank()])\n"
        "dist.all_reduce(total)\n"
        "print(total.item(), torch.get_num_threads())\n"
        "dist.destroy_process_group()\n"
        "sys.exit(len(sys.argv) - 1)\n"
    )
    assert run_ranks([str(script)], 2) == ["3.0 1\n"] * 2
    with pytest.raises(AssertionError, match=r"3\.0 1"):
        run_ranks([str(script), "fail"], 2)


def test_ports_are_given_once() -> None:
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) == 20
    assert max(ports) < 32768  # where Linux begins to give out ports of its own
