"""What the kits ask another process, and how long they wait for calls."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rlplug_devkit.other_process import Unavailable, call_elsewhere
from rlplug_devkit.tasks.calls import TaskChecks

LONG = "x" * 1_000_000
"""More than a pipe holds."""


class OnlyThere:
    """Raises where it is read in another process than the one that made it."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return only_in, (os.getpid(),)


def only_in(process: int) -> None:
    if process != os.getpid():
        raise ValueError("only there")


def answer(kind: str) -> Any:
    if kind == "late":
        threading.Event().wait(5.0)
    if kind == "ends":
        os._exit(3)
    return (OnlyThere(), LONG) if kind == "unreadable" else kind


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """Take all descriptors that select() can wait for."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for each in opened:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.kit
@pytest.mark.parametrize("is_fresh", [False, True])
@pytest.mark.usefixtures("many_open_files")
def test_an_answer_that_is_not_read_is_not_taken_for_the_next_one(is_fresh: bool) -> None:
    """Alone catches kits that wait for ever, or compare another check's values, after such an answer."""
    with pytest.raises(Unavailable, match="only there"):
        call_elsewhere(answer, "unreadable", timeout_s=60.0, is_fresh=is_fresh)
    assert call_elsewhere(answer, LONG, timeout_s=60.0, is_fresh=is_fresh) == LONG
    with pytest.raises(RuntimeError, match="ended with status 3"):
        call_elsewhere(answer, "ends", timeout_s=60.0, is_fresh=is_fresh)
    with pytest.raises(RuntimeError, match="no answer within 1 s"):
        call_elsewhere(answer, "late", timeout_s=1.0, is_fresh=is_fresh)
    assert call_elsewhere(answer, "next", timeout_s=60.0, is_fresh=is_fresh) == "next"


def test_calls_that_are_late_again_and_again_end_a_check() -> None:
    """Alone catches a kit without a verdict for a pool that waits for itself: each call has its whole deadline."""

    class Checks(TaskChecks):
        deadline_s = 0.1

    checks, held = Checks(), threading.Event()
    functions = [held.wait, lambda: 1]
    for _ in range(2):
        assert [call.error == "" for call in checks._calls(functions)] == [False, True]
        assert not checks._is_late
    with pytest.raises(pytest.fail.Exception, match=r"a call took longer than 0\.1 s, as others did before"):
        checks._calls(functions)
    assert checks._is_late
    assert not TaskChecks._is_late
    held.set()
