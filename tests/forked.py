"""Starts Python processes for tests by the fork server: in milliseconds, where ``subprocess`` imports torch anew."""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import select
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fork_server import VARIABLES

SERVER = Path(__file__).with_name("fork_server.py")


class ForkServer:
    """A server of this test process, and the folder with its socket and its processes' outputs."""

    def __init__(self, python: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="forked-"))
        self.num_started = 0
        self.address = str(self.folder / "socket")
        with socket.socket(socket.AF_UNIX) as listener, (self.folder / "server.log").open("w") as log:
            listener.bind(self.address)
            listener.listen(64)
            self._process = subprocess.Popen(
                [python, str(SERVER), str(listener.fileno())],
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | VARIABLES,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[listener.fileno()],
            )
        atexit.register(self.close)

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        return connection

    @property
    def log(self) -> str:
        """What the server itself printed, which is why it failed."""
        return (self.folder / "server.log").read_text()

    def close(self) -> None:
        """End the server, and with it all its processes and the folder."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


@functools.cache
def server(python: str) -> ForkServer:
    """Return the fork server of an environment's Python, which this process starts once."""
    return ForkServer(python)


class ForkedProcess:
    """A process of the fork server, with the part of ``subprocess.Popen`` that tests use.

    Attributes:
        returncode: ``None`` until ``poll`` or ``wait`` has seen the end.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        output: str | Path | None = None,
        separate_errors: bool = False,
    ) -> None:
        """Start ``command``, which begins with the path of a Python, such as ``sys.executable``.

        Args:
            env: The whole environment but for one thread of OpenMP; by default this process's.
            cwd: The folder to run in; by default this process's.
            output: The file for stdout and stderr.
            separate_errors: Keep stderr in a file of its own.
        """
        python, *self.args = map(str, command)
        place = self._server = server(python)
        place.num_started += 1
        self._stdout = Path(output or place.folder / f"{place.num_started}.out").absolute()
        self._stderr = self._stdout.with_suffix(".err") if separate_errors else self._stdout
        for file in (self._stdout, self._stderr):
            file.write_bytes(b"")  # it can be read at once
        one_thread = {"OMP_NUM_THREADS": "1"}  # of two, OpenMP uses one where cores are busy
        job = {"command": self.args, "env": one_thread | dict(os.environ if env is None else env)}
        job |= {"cwd": str(cwd or os.getcwd()), "stdout": str(self._stdout), "stderr": str(self._stderr)}
        self._connection = place.connect()
        self._connection.sendall(json.dumps(job).encode() + b"\n")
        self._unread = b""
        self.returncode: int | None = None
        self.pid = self._read(timeout=600)["pid"]  # the first one waits for the imports, longer on a busy machine

    def _read(self, timeout: float | None) -> dict[str, int]:
        """Return the next message; a server that has gone sends none."""
        while b"\n" not in self._unread:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0, output=self.stdout)
            received = self._connection.recv(4096)
            assert received, f"the fork server is gone: {self._server.log}"
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, int] = json.loads(line)
        return message

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once the process has ended."""
        if self.returncode is None:
            self.returncode = self._read(timeout)["exit_code"]
            self._end()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, or ``None`` while the process runs."""
        try:
            return self.wait(timeout=0)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill the process group if the process has not ended; ``returncode`` is -9 then."""
        if self.poll() is None:
            self.returncode = -9
            self._end()

    def _end(self) -> None:
        """Kill what is left of the process group, and wait for that."""
        self._connection.shutdown(socket.SHUT_WR)
        while self._connection.recv(4096):
            pass
        self._connection.close()

    @property
    def stdout(self) -> str:
        """What was printed so far, with stderr unless that is separate."""
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return "" if self._stderr == self._stdout else self._stderr.read_text()


def run_forked(
    command: Sequence[str | Path],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command as ``subprocess.run`` does, capturing text; after a timeout, kill its group."""
    process = ForkedProcess(command, env=env, cwd=cwd, separate_errors=True)
    try:
        code = process.wait(timeout)
    finally:
        process.kill()
    done = subprocess.CompletedProcess(process.args, code, process.stdout, process.stderr)
    if check:
        assert code == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@functools.cache
def _ports() -> Iterator[int]:
    """Count up from a port below those that the system gives out; other test processes begin elsewhere."""
    return itertools.count(10_000 + os.getpid() % 220 * 100)


def free_port() -> int:
    """Return a port of this machine that nothing listens on, and that this process has not returned before."""
    for port in _ports():
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("there is always another port")


def torchrun_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for one of the ranks of a host."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }
