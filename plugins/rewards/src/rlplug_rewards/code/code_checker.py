"""Checker of code that a model wrote, for the workers of :class:`rlplug_sandbox.sandbox.ToolPool`.

It uses the standard library alone, so that a worker needs neither torch nor its memory. It runs in a call of the
sandbox, and the code in a process of its own below it, started anew for each test with a Python that has nothing of
this one's memory. So the code never sees what is expected of it, and what it prints, raises, replaces or exits with is
no verdict.

- *Cases*: the code is a program; what it prints for an input is compared here.
- *Tests*: statements run here, in which the code's functions are stand-ins. They never stand in for Python's built-ins
  or the standard library, which tests import themselves. A call goes to the process of the code, and plain data comes
  back: None, booleans, numbers, text, bytes, and lists, tuples, sets and dictionaries of these. Anything else stays
  there and is used through its stand-in. A stand-in is equal to nothing but itself, so that an ``__eq__`` of the code
  decides nothing.

The kernel keeps the code from this process's memory and pipes (``PR_SET_DUMPABLE``, prctl(2)). Where the code can end
this process, it fails all tests.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import functools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "code_program.py")
PR_SET_DUMPABLE = 4
MOST_BYTES = 1 << 20
"""Longest output of a program, and longest reply."""
NOT_ITS_OWN = {*dir(builtins), *sys.stdlib_module_names}
"""Names that mean what they mean in Python, whatever the code defines: its own ``abs`` would decide a comparison."""
STRANGE = "the code's process answered with what is no reply"


def check(
    code: str, tests: Sequence[str], cases: Sequence[Sequence[str]], test_s: float, time_s: float, needs_all: bool
) -> str:
    """Return how many tests and cases the code passes, as text.

    Args:
        code: Python source.
        tests: Statements such as ``assert double(2) == 4``, each run against the code loaded anew.
        cases: Pairs of a standard input and the standard output that it must have. White space at the ends of lines and
            of the output does not count.
        test_s: Longest time for one of them in seconds, the start of its process included.
        time_s: Time in seconds after which none is begun.
        needs_all: Whether the first failure ends it.
    """
    ends_at = time.monotonic() + time_s
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the checker cannot be kept from the code")
    runs = [functools.partial(_run_test, code, test) for test in tests]
    runs += [functools.partial(_run_case, code, given, expected) for given, expected in cases]
    passed = 0
    for run in runs:
        now = time.monotonic()
        try:
            if now < ends_at:
                run(min(ends_at, now + test_s))
                passed += 1
        except Exception:  # noqa: BLE001 - an assertion, a timeout, or whatever the code or the test raised
            if needs_all:
                break
    return str(passed)


def _run_test(code: str, test: str, ends_at: float) -> None:
    """Return if the code passes a test, or raise."""
    with _served(code, ends_at) as solution:
        exec(compile(test, "<test>", "exec"), {"__name__": "test", **solution.names()})


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
            command, pass_fds=(read_end, *files), start_new_session=True, bufsize=0, **settings
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
    """Give a process its input, and return its output.

    Raises:
        TimeoutError: It is late.
        OSError: It prints too much.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    os.set_blocking(process.stdin.fileno(), False)
    poller = select.poll()
    poller.register(process.stdout, select.POLLIN)
    if data:
        poller.register(process.stdin, select.POLLOUT)
    else:
        process.stdin.close()
    printed = b""
    while True:
        for file, _ in _poll(poller, ends_at):
            if file == process.stdout.fileno():
                part = process.stdout.read(65536)
                printed += part
                if not part:
                    return printed
                if len(printed) > MOST_BYTES:
                    raise OSError("it prints too much")
                continue
            try:
                data = data[os.write(file, data[:65536]) :]
            except BrokenPipeError:  # it reads no more
                data = b""
            if not data:
                poller.unregister(file)
                process.stdin.close()


def _poll(poller: select.poll, ends_at: float) -> list[tuple[int, int]]:
    left = ends_at - time.monotonic()
    found = poller.poll(left * 1000) if left > 0 else []
    if not found:
        raise TimeoutError("the code is late")
    return found


# ---- tests ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _served(code: str, ends_at: float) -> Iterator[Solution]:
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
            yield Solution(requests, replies, ends_at)


class Solution:
    """The code in its process."""

    def __init__(self, requests: Any, replies: Any, ends_at: float) -> None:
        self._requests, self._replies, self._ends_at = requests, replies, ends_at
        self._rest = b""

    def names(self) -> dict[str, Any]:
        """Return what the code defines, by name."""
        kind, *found = self._reply()
        if kind == "error":
            _raise(str(found[0]))
        if kind != "names" or not isinstance(found[0], list):
            raise ValueError(STRANGE)
        return {str(name): self._value(shown) for name, shown in found[0] if str(name) not in NOT_ITS_OWN}

    def ask(self, operation: str, target: Any, *arguments: Any, **named: Any) -> Any:
        """Return what an operation on one of the code's objects gives.

        Raises:
            Exception: What the code raised, where that is a class of Python's own; otherwise ``RuntimeError``.
        """
        given = [_argument(value) for value in arguments]
        given_named = [(name, *_argument(value)) for name, value in named.items()]
        self._requests.write(f"{(operation, target, given, given_named)!r}\n".encode())
        found = self._reply()
        if found[0] == "error":
            _raise(str(found[1]))
        return self._value(found)

    def _reply(self) -> tuple[Any, ...]:
        poller = select.poll()
        poller.register(self._replies, select.POLLIN)
        while b"\n" not in self._rest:
            _poll(poller, self._ends_at)
            part = self._replies.read(65536)
            self._rest += part
            if not part or len(self._rest) > MOST_BYTES:
                raise ValueError(STRANGE)
        line, _, self._rest = self._rest.partition(b"\n")
        found = ast.literal_eval(line.decode())
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(STRANGE)
        return found

    def _value(self, shown: Any) -> Any:
        kind, value = shown
        return ast.literal_eval(value) if kind == "value" else _Remote(self, value)


class _Remote:
    """Stand-in for an object of the code's process. It is equal to itself alone."""

    def __init__(self, solution: Solution, target: Any) -> None:
        self._remote = solution, target

    def _ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        solution, target = self._remote
        return solution.ask(operation, target, *arguments, **named)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", name)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("list"))

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __bool__(self) -> bool:
        return bool(self._ask("bool"))

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))


def _argument(value: Any) -> tuple[str, Any]:
    if isinstance(value, _Remote):
        return "object", value._remote[1]
    text = repr(value)
    ast.literal_eval(text)  # a ValueError here: the test gives the code what is no plain data
    return "value", text


def _raise(name: str) -> NoReturn:
    kind = getattr(builtins, name, None)
    error: Exception = RuntimeError(f"the completion's code raised {name}")
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # some need more arguments
            error = kind("in the completion's code")
    raise error
