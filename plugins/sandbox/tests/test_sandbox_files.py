"""Files that a call sees which may read Python alone: as root and as an ordinary user, with and without namespaces."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rlplug_sandbox.sandbox import SCRIPT
from test_sandbox_isolation import TESTS, USER, ordinary_python

SETTINGS = {"time_s": 60.0, "memory_mib": 64, "output_chars": 1000, "max_processes": 8, "network": False}
ATTEMPTS = (
    *("list the folder", "read a file for all", "read a file of its user", "read a file in a program"),
    *("read the system's users", "write a file", "replace a file", "change a mode", "change a time"),
    *("leave the root", "read the trainer", "signal the trainer", "fill the buffers of sockets"),
    *("limit the trainer", "slow the trainer", "move the trainer", "be root in a user namespace"),
    *("be root in a user namespace by a fork", "reach another by a pair", "pass on a socket of a pair"),
    *("send from a pair of datagrams", "leave ten thousand empty files", "open a thousand files"),
)
LANDLOCK = ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1)


@contextmanager
def worker(lacks: str, as_user: bool) -> Iterator[tuple[dict[str, Any], Callable[..., str]]]:
    """Start a worker as root or not, where the kernel lacks something; yield its first reply, and what calls it."""
    python, prefix = sys.executable, []
    if as_user and os.geteuid() == 0:
        python, prefix = ordinary_python(), ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    elif not as_user and os.geteuid() != 0:
        pytest.skip("needs root")
    functions = [f"walled_calls.{name}" for name in ("attempt", "solve", "fill_memory", "run_event_loop")]
    own_path = subprocess.check_output([python, "-I", "-c", "import json, sys; print(json.dumps(sys.path))"])
    paths = [str(TESTS), *json.loads(own_path)]
    settings = SETTINGS | {"functions": functions, "folders": [str(TESTS)], "module_path": paths}
    command = [*prefix, python, str(TESTS / "walled_calls.py"), lacks, str(SCRIPT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(message: dict[str, Any]) -> dict[str, Any]:
            print(json.dumps(message), file=process.stdin, flush=True)
            line = process.stdout.readline()
            if not line:
                pytest.skip("the sandbox is not readable by an ordinary user")
            reply: dict[str, Any] = json.loads(line)
            return reply

        def call(function: str, /, **arguments: Any) -> str:
            reply = ask({"function": f"walled_calls.{function}", "arguments": arguments, "seed": "0"})
            return str(next(iter(reply.values())))

        yield ask(settings) | {"trainer": process.pid}, call
        process.stdin.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that every user may change, with a file that all may read and one that its user alone may."""
    place = Path(os.path.realpath("/var/tmp")) / f"rlplug-{tmp_path.name}-{os.getpid()}"
    place.mkdir()
    place.chmod(0o777)
    for name, mode in (("for-all", 0o644), ("for-me", 0o600)):
        (place / name).write_text("4")
        (place / name).chmod(mode)
        if os.geteuid() == 0:
            os.chown(place / name, USER, USER)
    yield place
    for path in place.iterdir():
        path.unlink()
    place.rmdir()


@pytest.mark.parametrize("as_user", [False, True])
@pytest.mark.parametrize("lacks", ["", "namespaces", "namespaces,landlock"])
def test_a_call_sees_python_alone_or_says_what_it_sees(folder: Path, lacks: str, as_user: bool) -> None:
    """Catches a file, process or buffer within a call's reach, and a wall that is promised where none stands."""
    with worker(lacks, as_user) as (first, call):
        isolation = first["text"]
        has_namespaces = "see no process" in isolation
        if not lacks and not has_namespaces:
            pytest.skip(f"no namespaces here: {isolation}")
        of_all = {"trainer": first["trainer"], "folder": str(folder)}
        possible = {name for name in ATTEMPTS if call("attempt", name=name, **of_all) == "possible"}
        needed = 0 if not lacks else 6 if as_user else 1  # version of Landlock
        is_bare = "landlock" in lacks or needed > LANDLOCK
        assert first["hides_files"] is (not is_bare)
        assert first["is_isolated"] is (not (is_bare and as_user))
        if is_bare:
            assert possible >= {"list the folder", "read a file for all", "write a file"}
            assert ("signal the trainer" in possible) is as_user
            assert "without a wall before the files" in isolation
            return
        assert possible == set()
        assert sorted(path.name for path in folder.iterdir()) == ["for-all", "for-me"]
        assert call("run_event_loop") == "3"
        assert "in all its processes" in call("fill_memory", num_processes=5, mib=50)
        assert call("solve", text="4") == ("4" if has_namespaces else "")
