"""Functions that tests let a policy call; most of them misbehave."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

calls = 0


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def echo(value: Any) -> Any:
    """Return what it gets.

    Args:
        value: Anything.
    """
    return value


def paint(
    colour: Literal["red", "blue"],
    sizes: list[int] | None = None,
    scale: float = 1.0,
    names: dict[str, str] | None = None,
) -> str:
    """Paint.

    Args:
        colour: What colour.
        sizes: How large.
        scale: A factor.
        names: Of things.
    """
    return f"{colour} {sizes} {scale} {names}"


def sleep(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "slept"


def spin() -> None:
    """Compute for ever, in one C call."""
    print(9**9**9**9)


def hoard(mib: int) -> int:
    """Take memory.

    Args:
        mib: How much.
    """
    return len(bytearray(mib * 2**20))


def shout(length: int, letter: str = "x") -> str:
    """Return a long text.

    Args:
        length: How long.
        letter: What it is made of.
    """
    return letter * length


def fail(message: str) -> None:
    """Raise.

    Args:
        message: Of the error.
    """
    raise LookupError(message)


def leave(code: int) -> None:
    """End the process.

    Args:
        code: Its exit code.
    """
    os._exit(code)


def politely_leave() -> None:
    """Ask the interpreter to end."""
    sys.exit(3)


def crash() -> None:
    """Read from address 0."""
    ctypes.string_at(0)


def bomb() -> None:
    """Fork in all processes, for ever."""
    while True:
        try:
            os.fork()
        except OSError:
            continue


def comet() -> None:
    """Be replaced by a child of another session, for ever."""
    while True:
        try:
            if os.fork():
                os._exit(0)
            os.setsid()
        except OSError:
            continue


def fork_all() -> int:
    """Return how many children it could have."""
    for count in range(1000):
        try:
            child = os.fork()
        except OSError:
            return count
        if child == 0:
            time.sleep(60)
    return 1000


def start_daemon(seconds: str) -> str:
    """Start a program in a session of its own, and answer.

    Args:
        seconds: How long it sleeps; marks it for the test.
    """
    subprocess.Popen(["setsid", "sleep", seconds], start_new_session=True)
    return "started"


def user() -> list[int]:
    """Return user ids, and whether it may change them back."""
    try:
        os.setuid(0)
        may = 1
    except OSError:
        may = 0
    return [*os.getresuid(), may]


def kill_parent() -> str:
    """Kill the worker."""
    os.kill(os.getppid(), 9)
    return "killed"


def draw() -> float:
    """Draw a number."""
    return random.random()


def count() -> int:
    """Return how often this module saw a call."""
    global calls
    calls += 1
    return calls


def talk() -> str:
    """Print, and answer."""
    print("aloud")
    os.write(1, b"{}\n")
    os.write(2, b"error\n")
    return sys.stdin.read() + "done"


def scribble() -> None:
    """Write to every open file descriptor."""
    for file in range(3, 20):
        try:
            os.write(file, b"nonsense\n" * 100)
        except OSError:
            continue


def write(path: str, size: int) -> int:
    """Write a file.

    Args:
        path: Where.
        size: Bytes.
    """
    return Path(path).write_bytes(b"x" * size)


def half_a_letter() -> str:
    """Return no valid text."""
    return "a\ud800b"


def bare(value: int) -> int:
    return value


def untyped(value) -> int:
    """Have no type.

    Args:
        value: Something.
    """
    return value


def pair(value: tuple[int, int]) -> int:
    """Take a pair.

    Args:
        value: A pair.
    """
    return value[0]


def many(*values: int) -> int:
    """Take many.

    Args:
        values: Numbers.
    """
    return sum(values)


async def later() -> int:
    """Be async."""
    return 1
