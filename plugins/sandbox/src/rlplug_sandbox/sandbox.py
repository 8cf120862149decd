"""Sandbox that runs function calls in processes with limits, from any number of threads.

A pool keeps a few worker processes that have imported the functions. A call is a process forked from a worker, so it
starts in some 10 milliseconds, sees the modules as they were imported, and leaves nothing behind: after its answer, or
at its time limit, it is killed with all processes that it started.

Limits of a call:

- *Time* counts from the start of the call, without the wait for a worker, as does the deadline of a reward.
- *Memory* counts for each process of the call, beyond the memory of the worker; all of them together may hold twice as
  much, which the worker looks at ten times a second. A file may hold 16 MiB.
- *Processes* include threads. As root, a call runs as a user of its own without other processes, so that the kernel
  counts those of the call. A call of another user keeps that user, of whom the kernel counts all processes: the limit
  is the number that the user has when the call starts, plus ``max_processes``.
- *Files*: as root, a call can read what root can, and write where every user can, such as ``/tmp``. A call of another
  user has that user's rights. With :attr:`Limits.folders` a call sees Python and those folders alone: with namespaces
  in a root folder of its own, and without them by Landlock, where it can write nothing. A process may have 256 files
  open.
- *Output* is the return value alone. Printed text is discarded.

A worker also ends its call when it has to end itself, when the trainer ends, and when the trainer is killed. If the
worker itself is killed, the first process of its call ends with it; the trainer, if it is root and still runs, ends the
others.

Isolation of a call, beside its limits:

- It has namespaces of its own, so that it sees no other process, cannot signal or read the trainer, and has a
  ``/dev/shm`` of its own, of at most the memory limit and 64 files per MiB, that ends with it. As root they need
  ``CAP_SYS_ADMIN``; another user needs a kernel that allows user namespaces. Without them, a call of root is still
  another user's, and a call of another user can signal and read the trainer, unless Landlock refuses that (Linux 6.12,
  with :attr:`Limits.folders`): :attr:`ToolPool.isolation` says what the first call found by trying.
- A filter of system calls refuses memory that no limit counts (``memfd_create``, System V and POSIX queues), the
  memory, limits and priority of other processes, mounts, and new namespaces. It knows x86_64 and aarch64.
- Sockets are refused where :attr:`Limits.network` is false, but for pairs of streams, which asyncio needs: they lead
  nowhere else, and hold at most 208 KiB in each direction.

The sandbox is no protection against code that attacks the kernel, which needs a virtual machine, and a tool's call can
use the network, the environment variables, and, without :attr:`Limits.folders`, the files of its user.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlplug.distributed.child_process import ChildProcess
from rlplug.timeouts import is_given_up, waiting
from rlplug_sandbox.sandbox_limits import own_user

SCRIPT: Final = Path(__file__).with_name("sandbox_process.py")
END_SCRIPT: Final = Path(__file__).with_name("sandbox_limits.py")
THREADS: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
START_S: Final = 300.0
"""Longest time in seconds for a worker to import the functions."""
LATE_S: Final = 60.0
"""Longest delay in seconds of a worker's answer after a call's time limit, on a very busy machine."""
STOP_S: Final = 10.0
LOOK_S: Final = 0.25
"""Time in seconds between two looks whether anybody still waits for a call."""


class SandboxError(RuntimeError):
    """Error of the sandbox and not of the policy: calls cannot run at all, or a worker ended."""


@dataclass(frozen=True)
class Limits:
    """Limits of one call."""

    time_s: float
    memory_mib: int
    output_chars: int
    max_processes: int
    network: bool = True
    """Whether sockets are allowed."""
    folders: tuple[str, ...] | None = None
    """Folders that a call may read beside Python's; it writes to its ``/dev/shm`` alone. ``None``: its user's files."""


@dataclass(frozen=True)
class ToolResult:
    """Result of a call as text: its return value, or an error message."""

    text: str
    is_error: bool = False


class ToolPool:
    """Pool of worker processes that run one call at a time each, started when they are needed.

    Args:
        functions: Import paths of the functions.
        limits: Limits of each call.
        num_workers: Largest number of workers.
        environment: Environment variables of the calls; the trainer's by default.
        module_path: Folders in which modules are found; the trainer's by default.
    """

    def __init__(
        self,
        functions: Sequence[str],
        limits: Limits,
        num_workers: int,
        environment: Mapping[str, str] | None = None,
        module_path: Sequence[str] | None = None,
    ) -> None:
        self.functions, self.limits = tuple(functions), limits
        self.isolation = ""
        """Isolation that calls have, and what this machine lacks of it, once :meth:`check` has returned."""
        self.is_isolated = False
        """Whether calls cannot reach the trainer, which a call has tried, and have a filter of system calls."""
        self.hides_files = False
        """Whether, beyond that, they can neither read nor write the files of their user, which a call has tried."""
        self._environment, self._module_path = environment, module_path
        self._workers: list[ChildProcess] = []
        self._idle: list[ChildProcess] = []
        self._num_free = num_workers
        self._change = threading.Condition()
        weakref.finalize(self, _stop, self._workers)

    def check(self) -> None:
        """Start a worker if none runs.

        Raises:
            SandboxError: The worker cannot run calls; the message says why.
        """
        self._give_back(self._take(lambda: False))

    def call(
        self, function: str, arguments: Mapping[str, Any], seed: str, is_cancelled: Callable[[], bool] = lambda: False
    ) -> ToolResult:
        """Wait for a free worker, run a function on it, and return the result.

        A call that missed its deadline (:mod:`rlplug.timeouts`), or was cancelled, ends at once, with its worker.

        Args:
            function: One of the pool's import paths.
            arguments: Arguments by name, as JSON values.
            seed: Seed of the ``random`` module (and of NumPy's global generator, where it is imported) in the call.
            is_cancelled: Called after each :meth:`wake` while the call waits for a worker, and each ``LOOK_S`` while it
                runs; true cancels the call.

        Raises:
            SandboxError: The call did not run, or its worker ended.
        """
        with waiting():  # for others' calls, and for a worker's start: neither is this call's doing
            worker = self._take(is_cancelled)
        try:
            reply = _ask(
                worker,
                {"function": function, "arguments": arguments, "seed": seed},
                time.monotonic() + self.limits.time_s + LATE_S,
                16 * self.limits.output_chars + 2000,
                lambda: is_given_up() or is_cancelled(),
            )
        except BaseException:
            self._discard(worker)
            raise
        self._give_back(worker)
        if "failure" in reply:
            raise SandboxError(f"A call of {function} could not run: {reply['failure']}.")
        text = reply["error"] if "error" in reply else reply["text"]
        # a tokenizer cannot take half of a surrogate pair
        return ToolResult(text.encode(errors="replace").decode(), is_error="error" in reply)

    def wake(self) -> None:
        """Wake the calls that wait for a worker, so that they check whether they are cancelled."""
        with self._change:
            self._change.notify_all()

    # ---- workers ----------------------------------------------------------------------------------------------------

    def _take(self, is_cancelled: Callable[[], bool]) -> ChildProcess:
        with self._change:
            self._change.wait_for(lambda: self._num_free > 0 or is_cancelled())
            if is_cancelled():
                self._change.notify()  # the notification may have been meant for another call
                raise SandboxError("The call was cancelled before it began.")
            self._num_free -= 1
            if self._idle:
                return self._idle.pop()
        try:
            return self._start()
        except BaseException:
            self._free()
            raise

    def _start(self) -> ChildProcess:
        worker = ChildProcess(
            [sys.executable, str(SCRIPT), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**(os.environ if self._environment is None else self._environment), **THREADS},
        )
        self._workers.append(worker)
        settings = {**vars(self.limits), "functions": self.functions}
        # absolute: a relative entry, such as a notebook's '', would become the folder that a call writes to
        paths = sys.path if self._module_path is None else self._module_path
        settings["module_path"] = [os.path.abspath(path) for path in paths]
        try:
            reply = _ask(worker, settings, time.monotonic() + START_S, 100_000, lambda: False)
            if "text" not in reply:
                raise SandboxError(f"{', '.join(self.functions)} cannot be called: {' '.join(reply.values())}.")
        except BaseException:
            self._end(worker)
            raise
        self.isolation, self.is_isolated, self.hides_files = reply["text"], reply["is_isolated"], reply["hides_files"]
        return worker

    def _give_back(self, worker: ChildProcess) -> None:
        self._idle.append(worker)
        self._free()

    def _discard(self, worker: ChildProcess) -> None:
        self._end(worker)
        self._free()

    def _free(self) -> None:
        with self._change:
            self._num_free += 1
            self._change.notify()

    def _end(self, worker: ChildProcess) -> None:
        _stop([worker])
        assert worker.stdout is not None
        worker.stdout.close()
        self._workers.remove(worker)


def _ask(
    worker: ChildProcess,
    message: Mapping[str, Any],
    deadline: float,
    largest: int,
    is_cancelled: Callable[[], bool],
) -> dict[str, Any]:
    """Return a worker's reply of at most ``largest`` bytes."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    data = json.dumps(message).encode() + b"\n"
    try:
        while data:
            data = data[worker.stdin.write(data) :]
    except (BrokenPipeError, ValueError):  # ValueError: the pool ended, and closed the worker's input
        raise _ended(worker) from None
    poller = select.poll()
    poller.register(worker.stdout, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or len(line) > largest:
            raise SandboxError("A process that runs tools did not answer in time.")
        if is_cancelled():
            raise SandboxError("The call was ended, because nobody waits for it any more.")
        if poller.poll(min(left, LOOK_S) * 1000):
            part = worker.stdout.read(65536)
            if not part:
                raise _ended(worker)
            line += part
    reply: dict[str, Any] = json.loads(line)
    return reply


def _ended(worker: ChildProcess) -> SandboxError:
    try:
        code = worker.wait(STOP_S)
    except subprocess.TimeoutExpired:
        return SandboxError("A process that runs tools closed its pipe.")
    return SandboxError(f"A process that runs tools ended with code {code}; the log has what it printed.")


def _stop(workers: list[ChildProcess]) -> None:
    """End workers, each with the call that it runs.

    Their output stays open: at the exit of Python a thread may still read it, and reads its end.
    """
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.close()  # the worker ends at the end of its input
    deadline = time.monotonic() + STOP_S
    for worker in workers:
        status = worker.end(max(0.0, deadline - time.monotonic()))
        if status != 0 and (user := own_user(worker.pid)) is not None:  # its call may still run
            subprocess.run([sys.executable, str(END_SCRIPT), str(user)], check=False)
