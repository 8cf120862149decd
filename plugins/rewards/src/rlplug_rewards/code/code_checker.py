"""Checker of code that a model wrote, for the workers of :class:`rlplug_sandbox.sandbox.ToolPool`.

It uses the standard library alone, so that a worker needs neither torch nor its memory. It runs in a call of the
sandbox, and the code in a process of its own below it, started anew for each test with a Python that has nothing of
this one's memory. So the code never sees what is expected of it, and what it prints, raises, replaces or exits with is
no verdict.

- *Cases*: the code is a program; what it prints for an input is compared here.
- *Tests*: statements run here, in which names of the code are its data or stand-ins (:mod:`code_stand_ins`). Which
  names are the code's follows from the row alone; Python's built-ins and modules mean what they mean in Python. A
  call goes to the process of the code, and data comes back by value: numbers, text, containers and what the standard
  library makes of them; what the call changed in its arguments is changed here. Other objects stay there.

The kernel keeps the code from this process's memory and pipes (``PR_SET_DUMPABLE``, prctl(2)). Where the code can end
this process, it fails all tests. Nothing of one test is there in the next: where the call has namespaces of its own,
all other processes are killed and the code's folder is emptied; without them code has no folder to write to.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlplug_rewards.code import code_stand_ins as stand_ins
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import code_stand_ins as stand_ins

    del sys.path[0]

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "code_program.py")
PR_SET_DUMPABLE = 4
OWN_FOLDER = "/dev/shm"
"""Folder of the code, in a call with namespaces, in which this is the first process."""
MOST_BYTES = 1 << 20
"""Longest output of a program."""


def check(
    code: str,
    tests: Sequence[str],
    cases: Sequence[Sequence[str]],
    names: Sequence[str],
    classes: Sequence[str],
    modules: Sequence[str],
    test_s: float,
    time_s: float,
    needs_all: bool,
) -> str:
    """Return how many tests and cases the code passes, as text.

    Args:
        code: Python source.
        tests: Statements such as ``assert double(2) == 4``, each run against the code loaded anew.
        cases: Pairs of a standard input and the standard output that it must have. White space at the ends of lines and
            of the output does not count.
        names: Names in the tests that are the code's.
        classes: Those of them whose instances the tests make and use as objects.
        modules: Modules of the standard library that the tests use without an import.
        test_s: Longest time for one of them in seconds, the start of its process included.
        time_s: Time in seconds after which none is begun.
        needs_all: Whether the first failure ends it.
    """
    ends_at = time.monotonic() + time_s
    sys.set_int_max_str_digits(0)
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the checker cannot be kept from the code")
    has_namespaces = os.getpid() == 1 and os.getcwd() == OWN_FOLDER
    os.chdir("/")
    runs = [functools.partial(_run_test, code, test, names, classes, modules) for test in tests]
    runs += [functools.partial(_run_case, code, given, expected) for given, expected in cases]
    passed = 0
    for run in runs:
        now = time.monotonic()
        try:
            if now < ends_at:
                if has_namespaces:
                    _start_afresh()
                run(min(ends_at, now + test_s))
                passed += 1
        except Exception:  # noqa: BLE001 - an assertion, a timeout, or whatever the code or the test raised
            if needs_all:
                break
    return str(passed)


def _start_afresh() -> None:
    """End what the last test's code left, and remove its files, or raise."""
    with contextlib.suppress(ProcessLookupError):  # there is none
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    for entry in os.scandir(OWN_FOLDER):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _run_test(
    code: str, test: str, names: Sequence[str], classes: Sequence[str], modules: Sequence[str], ends_at: float
) -> None:
    """Return if the code passes a test, or raise."""
    with _served(code, ends_at) as solution:
        own = {name: value for name, value in solution.names(classes).items() if name in names}
        known = {name: importlib.import_module(name) for name in modules}
        exec(compile(test, "<test>", "exec"), {"__name__": "test", **known, **own})


def _run_case(code: str, given: str, expected: str, ends_at: float) -> None:
    """Return if the code prints what is expected for an input, or raise."""
    with _process("run", code, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        printed = _communicate(process, given.encode(), ends_at)
        assert process.wait(max(0.0, ends_at - time.monotonic())) == 0
    assert _lines(printed.decode(errors="replace")) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


# ---- the process of the code ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _process(mode: str, code: str, *files: int, **pipes: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run the code in a new process, which ends with the context, with all that it started."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-I", PROGRAM, mode, str(read_end), *map(str, files)]
    settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | pipes
    try:
        process: Any = subprocess.Popen(
            command,
            pass_fds=(read_end, *files),
            start_new_session=True,
            bufsize=0,
            cwd=OWN_FOLDER if os.getpid() == 1 else None,
            **settings,
        )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    try:
        with open(write_end, "wb") as file, contextlib.suppress(BrokenPipeError):
            file.write(code.encode(errors="replace"))
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _communicate(process: subprocess.Popen[bytes], data: bytes, ends_at: float) -> bytes:
    """Give a process its input, and return its output up to its end, whoever else keeps its pipe open.

    Raises:
        TimeoutError: It is late.
        OSError: It prints too much.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    os.set_blocking(process.stdin.fileno(), False)
    os.set_blocking(process.stdout.fileno(), False)
    poller = select.poll()
    poller.register(process.stdout, select.POLLIN)
    end = os.pidfd_open(process.pid)
    poller.register(end, select.POLLIN)
    if data:
        poller.register(process.stdin, select.POLLOUT)
    else:
        process.stdin.close()
    printed = b""
    try:
        while True:
            ready = [file for file, _ in stand_ins.wait(poller, ends_at)]
            if data and process.stdin.fileno() in ready:
                try:
                    data = data[os.write(process.stdin.fileno(), data[:65536]) :]
                except BrokenPipeError:  # it reads no more
                    data = b""
                if not data:
                    poller.unregister(process.stdin)
                    process.stdin.close()
            if process.stdout.fileno() in ready or end in ready:
                part = process.stdout.read(65536)  # None while there is nothing
                printed += part or b""
                if part == b"" or (part is None and end in ready):
                    return printed
                if len(printed) > MOST_BYTES:
                    raise OSError("it prints too much")
    finally:
        os.close(end)


# ---- tests ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _served(code: str, ends_at: float) -> Iterator[stand_ins.Solution]:
    """Load the code in a new process, which answers requests."""
    their_requests, our_requests = os.pipe()
    our_replies, their_replies = os.pipe()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_process("serve", code, their_requests, their_replies))
        finally:
            os.close(their_requests)
            os.close(their_replies)
        with open(our_requests, "wb", buffering=0) as requests, open(our_replies, "rb", buffering=0) as replies:
            yield stand_ins.Solution(requests, replies, ends_at)
