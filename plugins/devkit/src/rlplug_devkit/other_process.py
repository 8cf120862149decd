"""Other Python processes, in which functions are called as another rank, on another day, would call them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import pickle
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psutil

from rlplug.errors import describe
from rlplug_devkit import other_machine

VARIABLES: Final = {"RANK": "1", "LOCAL_RANK": "1", "LC_ALL": "C"}
"""What differs there, besides the seed of hashes, the process's number, the working folder, and the machine."""


HEADER: Final = 8
"""Bytes in front of a job and of an answer, which say how many follow."""
FRESH: Final = "--fresh"
"""Argument of a process that answers each job in a child."""
IMPORTED: Final = ("tasks.rewards", "tasks.environments", "tasks.data_sources", "models")
"""Modules of this package that a child need not import."""
_PROCESSES: Final[dict[bool, subprocess.Popen[bytes]]] = {}
"""The process that is asked again, and the one that answers in children."""


class Unavailable(Exception):
    """The function or its arguments cannot be sent to another process."""


def call_elsewhere(function: Callable[..., Any], *arguments: Any, timeout_s: float, is_fresh: bool = False) -> Any:
    """Return what a function returns in the other process, which is started once.

    Args:
        function: The function.
        arguments: Its arguments.
        timeout_s: Longest time, in seconds.
        is_fresh: Call it in a process in which nothing was called before, nor imported but the kits.

    Raises:
        Unavailable: Something cannot be pickled, or not be unpickled on the other side.
        RuntimeError: The function raised there, or did not return in time.
    """
    try:
        job = pickle.dumps((function, arguments))
    except Exception as error:
        raise Unavailable(describe(error)) from error
    process = _process(is_fresh)
    try:
        answer = _asked(process, job, time.monotonic() + timeout_s)
    except BaseException:  # of pytest-timeout too: its late answer would be taken for that of the next job
        _end(_PROCESSES.pop(is_fresh))
        raise
    try:
        outcome, value = pickle.loads(answer)
    except Exception as error:  # of what a plugin returned
        raise Unavailable(describe(error)) from error
    if outcome == "unavailable":
        raise Unavailable(value)
    if outcome == "raised":
        raise RuntimeError(value)
    return value


def _asked(process: subprocess.Popen[bytes], job: bytes, ends_at: float) -> bytes:
    """Return a process's pickled answer to a job.

    Raises:
        RuntimeError: It has ended, or gave none in time.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    began, found, size = time.monotonic(), b"", HEADER
    answers = select.poll()  # select() takes no descriptor above 1023
    answers.register(process.stdout, select.POLLIN)
    with contextlib.suppress(OSError):  # it has ended, and the pipe says so below
        process.stdin.write(len(job).to_bytes(HEADER) + job)
        process.stdin.flush()
    while len(found) < size:
        if not answers.poll(1000 * max(ends_at - time.monotonic(), 0.0)):
            raise RuntimeError(f"no answer within {ends_at - began:.0f} s")
        part = os.read(process.stdout.fileno(), size - len(found))
        if not part:
            raise RuntimeError(f"the process ended with status {process.wait()}")
        found += part
        if size == len(found) == HEADER:
            size += int.from_bytes(found)
    return found[HEADER:]


def _process(is_fresh: bool) -> subprocess.Popen[bytes]:
    """Return the process, or another one where it has ended."""
    known = _PROCESSES.get(is_fresh)
    if known is not None and known.poll() is None:
        return known
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-m", "rlplug_devkit.other_process", *([FRESH] if is_fresh else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=tempfile.gettempdir(),
        env=os.environ | VARIABLES | {"TZ": _zone_of_another_day(), "PYTHONHASHSEED": seed, "PYTHONPATH": path},
    )
    atexit.register(_end, process)
    _PROCESSES[is_fresh] = process
    return process


def _zone_of_another_day() -> str:
    """Return a zone in which today is another day than here; in one of these two it always is."""
    zones = {"Etc/GMT-14": 14, "Etc/GMT+12": -12}
    now, today = datetime.now(UTC), datetime.now().date()
    return next(zone for zone, hours in zones.items() if (now + timedelta(hours=hours)).date() != today)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children():
            child.kill()
    process.kill()
    process.wait()


def _serve(is_fresh: bool) -> None:
    """Answer jobs until the other side closes the pipe; what plugins print goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    other_machine.imitate()
    if is_fresh:
        for name in IMPORTED:  # once, and not in each child
            importlib.import_module(f"rlplug_devkit.{name}")
    while size := sys.stdin.buffer.read(HEADER):
        job = sys.stdin.buffer.read(int.from_bytes(size))
        pickled = _of_a_child(functools.partial(_answer, job)) if is_fresh else _pickled(_answer(job))
        answers.write(len(pickled).to_bytes(HEADER) + pickled)
        answers.flush()


def _answer(job: bytes) -> tuple[str, Any]:
    """Return what became of a job, and what it returned, or why not."""
    try:
        function, arguments = pickle.loads(job)
    except Exception as error:  # noqa: BLE001 - such as a module that only a test's folder has
        return "unavailable", describe(error)
    try:
        return "returned", function(*arguments)
    except Exception as error:  # noqa: BLE001 - the function's own
        return "raised", describe(error)


def _pickled(answer: tuple[str, Any]) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as error:  # noqa: BLE001 - of what a plugin returned
        return pickle.dumps(("unavailable", describe(error)))


def of_children(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return what functions return, each called in a child of this process, which must have no other threads.

    Raises:
        RuntimeError: One raised, or returned what cannot be pickled.
    """
    found = []
    for function in functions:
        outcome, value = pickle.loads(_of_a_child(lambda function=function: ("returned", function())))  # type: ignore[misc]
        if outcome != "returned":
            raise RuntimeError(value)
        found.append(value)
    return found


def _of_a_child(function: Callable[[], tuple[str, Any]]) -> bytes:
    """Return the pickled answer of a function that is called in a child, or that it raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writer, "wb") as answer:
            try:
                found = _pickled(function())
            except BaseException as error:  # noqa: BLE001 - that of pytest.fail is no Exception
                found = _pickled(("raised", describe(error)))
            answer.write(found)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answered:
        found = answered.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return found if status == 0 else _pickled(("raised", f"it ended with status {status}"))


if __name__ == "__main__":
    _serve(is_fresh=FRESH in sys.argv)
