"""A second Python process, on which functions are called as another rank, on another day, would call them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from rlplug.errors import describe
from rlplug_devkit import other_machine

VARIABLES: Final = {"RANK": "1", "LOCAL_RANK": "1", "LC_ALL": "C"}
"""What differs there, besides the seed of hashes, the process's number, the working folder, and the machine."""


class Unavailable(Exception):
    """The function or its arguments cannot be sent to another process."""


def call_elsewhere(function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """Return what a function returns in the other process, which is started once.

    Raises:
        Unavailable: Something cannot be pickled, or not be unpickled there.
        RuntimeError: The function raised there, or did not return in time.
    """
    try:
        job = pickle.dumps((function, arguments))
    except Exception as error:
        raise Unavailable(describe(error)) from error
    process = _process()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(len(job).to_bytes(8, "big") + job)
    process.stdin.flush()
    if not select.select([process.stdout], [], [], timeout_s)[0]:
        _process.cache_clear()
        _end(process)
        raise RuntimeError(f"no answer within {timeout_s:.0f} s")
    try:
        outcome, value = pickle.load(process.stdout)
    except EOFError as error:
        _process.cache_clear()
        raise RuntimeError(f"the process ended with status {process.wait()}") from error
    if outcome == "unavailable":
        raise Unavailable(value)
    if outcome == "raised":
        raise RuntimeError(value)
    return value


@functools.cache
def _process() -> subprocess.Popen[bytes]:
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-m", "rlplug_devkit.other_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=tempfile.gettempdir(),
        env=os.environ | VARIABLES | {"TZ": _zone_of_another_day(), "PYTHONHASHSEED": seed, "PYTHONPATH": path},
    )
    atexit.register(_end, process)
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
    process.kill()
    process.wait()


def _serve() -> None:
    """Answer jobs until the other side closes the pipe; what plugins print goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    other_machine.imitate()
    while size := sys.stdin.buffer.read(8):
        job = sys.stdin.buffer.read(int.from_bytes(size, "big"))
        answer: tuple[str, Any]
        try:
            function, arguments = pickle.loads(job)
        except Exception as error:  # noqa: BLE001 - such as a module that only a test's folder has
            answer = ("unavailable", describe(error))
        else:
            try:
                answer = ("returned", function(*arguments))
            except Exception as error:  # noqa: BLE001 - the function's own
                answer = ("raised", describe(error))
        answers.write(pickle.dumps(answer))
        answers.flush()


if __name__ == "__main__":
    _serve()
