"""Requests to stop: what each sequence of signals leads to, and that ranks agree."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from rlplug.distributed import stop_signal
from rlplug.distributed.stop_signal import StopSignal, end_at_once

INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.fixture(autouse=True)
def former() -> Iterator[None]:
    """What the signals do in any program; pytest has another handler where a shell started it in the background."""
    outer = {number: signal.getsignal(number) for number in (INT, TERM)}
    signal.signal(INT, signal.default_int_handler)
    yield
    for number, handler in outer.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.05)


@pytest.mark.parametrize(
    ("signals", "ends_at_once", "number"),
    [
        ([], False, None),
        ([INT], False, INT),
        ([TERM], False, TERM),
        ([INT, INT], True, INT),
        ([TERM, TERM, TERM], False, TERM),  # from a scheduler, a launcher and rank 0
        ([INT, TERM], False, INT),
        ([TERM, INT], False, TERM),
        ([TERM, INT, INT], True, TERM),
    ],
)
def test_the_first_signal_asks_and_only_a_second_ctrl_c_interrupts(
    signals: list[signal.Signals], ends_at_once: bool, number: signal.Signals | None, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = StopSignal()
    stop.install()
    for each in signals[: -1 if ends_at_once else None]:
        send(each)
    if ends_at_once:
        with pytest.raises(KeyboardInterrupt):
            send(signals[-1])
    assert stop.poll() == (number is not None)
    assert stop.number is None  # until all ranks agree
    assert stop.agree(list) == (number is not None)
    assert (stop.number, stop.exit_status) == (number, 0 if number is None else 128 + number)
    assert capfd.readouterr().err.count("finishing the phase, then saving.") == bool(signals)
    stop.uninstall()
    stop.uninstall()
    assert signal.getsignal(INT) is signal.default_int_handler
    stop.install()
    assert not stop.poll()  # the next fit is not ended by the former one's


def test_other_ranks_learn_of_a_signal_without_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signal, "POLL_S", 0.0)
    store = HashStore()
    ranks = [StopSignal() for _ in range(3)]
    for rank in reversed(ranks):  # rank 0 has the handler
        rank.install(store)
    assert not any(rank.poll() for rank in ranks)
    send(TERM)
    assert [rank.poll() for rank in ranks] == [True, True, True]
    assert [rank.agree(lambda own: [TERM, *own]) for rank in ranks] == [True] * 3
    assert {rank.exit_status for rank in ranks} == {143}
    for rank in ranks:
        rank.uninstall()


def test_a_rank_that_is_told_says_so_when_it_is_asked_next() -> None:
    """It catches a rank that stops generating, waits for the others, and has told them nothing."""
    store = HashStore()
    told, other = StopSignal(), StopSignal()
    other.install(store)
    told.install(store)
    assert not told.poll()  # the next one comes before POLL_S is over
    send(TERM)
    assert told.poll()
    assert other.poll()
    for rank in (told, other):
        rank.uninstall()


@pytest.mark.parametrize("number", [INT, TERM])
def test_before_the_first_step_a_signal_ends_the_process(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_signal, "_pipe_of_watch", lambda: -1)
    end_at_once()
    with pytest.raises(SystemExit) as end:
        send(number)
    assert end.value.code == 128 + number


WAYS = {
    "dropped": "try:\n    kill(); time.sleep(10)\nexcept BaseException:\n    pass\nkill(TERM); time.sleep(30)",
    "in C": "threading.Timer(0.1, kill).start()\nfor _ in range(2):\n    libc.pthread_mutex_lock(mutex)",
}
"""What the main thread does with the exception: it goes on, or it waits for a lock of C in which Python has no say."""


@pytest.mark.parametrize(
    ("handlers", "way", "number"),
    [("exit_at_once", "dropped", INT), ("end_at_once", "dropped", TERM), ("end_at_once", "in C", INT)],
)
def test_a_signal_ends_the_process_whatever_the_code_does(handlers: str, way: str, number: signal.Signals) -> None:
    """It catches a signal that is lost in an import, which drops what it raises, or in a wait for other ranks."""
    code = f"""
import ctypes, os, threading, time
from rlplug.distributed import stop_signal
TERM, libc, mutex = {int(TERM)}, ctypes.CDLL(None), ctypes.create_string_buffer(64)
def kill(number={int(number)}):
    os.kill(os.getpid(), number)
stop_signal.GRACE_S = 0.5
stop_signal.{handlers}()
{WAYS[way]}
"""
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=25, check=False)
    assert ended.returncode == 128 + number, ended.stderr
    assert ended.stderr.count(": ended; no") == (way == "dropped")
    assert ended.stderr.count("without closing") == (handlers == "end_at_once")
    assert time.monotonic() - began < 8


def test_an_end_without_closing_shows_the_cursor_of_a_terminal() -> None:
    """The progress display, which begins with the start of a run, hides it."""
    code = """
import os, signal, time
from rlplug.distributed import stop_signal
stop_signal.end_at_once()
for _ in range(2):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except SystemExit:
        pass
"""
    ours, terminal = os.openpty()
    try:
        ended = subprocess.run([sys.executable, "-c", code], stderr=terminal, timeout=120, check=False)
        assert ended.returncode == 128 + INT
        assert os.read(ours, 4096).endswith(b"\x1b[?25h")
    finally:
        os.close(ours)
        os.close(terminal)
