"""Ctrl-C and SIGTERM: requests to stop, on which all ranks of a run agree before they act.

The command line imports this module first of all, so it imports nothing that takes time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

NAMES: Final = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
AGAIN: Final = {signal.SIGINT: " Press it again to stop at once.", signal.SIGTERM: ""}
POLL_S: Final = 0.5
"""Shortest time in seconds between two questions of a rank whether another one was told to stop."""
GRACE_S: Final = 10.0
"""Time in seconds that a process has to close what it started, when a signal ends it before the first step."""
STDERR: Final = 2
_RANK_VARIABLES: Final = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


class StopRequested(Exception):
    """Exception on all ranks when a step, or a validation, can be discarded because the run is told to stop."""


class SignalExit(SystemExit):
    """End of a process by a signal before its first step."""


class StopSignal:
    """Handler that turns the first Ctrl-C or SIGTERM of any rank into a request to stop all.

    A second Ctrl-C of a rank interrupts it at once. A second SIGTERM changes nothing, because schedulers and launchers
    send it more than once, and SIGKILL after a while.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """Signal that ends the run: the same on all ranks, and ``None`` until :meth:`agree` has returned true."""
        self._wanted: int | None = None
        """Signal that reached this rank, or of which it learned."""
        self._has_interrupt = False
        self._former: dict[int, Any] = {}
        self._store: Store | None = None
        self._key = ""
        self._rank = 0
        self._num_installed = 0
        self._posted = False
        self._next_poll = 0.0

    @property
    def name(self) -> str | None:
        """Name of the signal that ends the run."""
        return None if self.number is None else NAMES[signal.Signals(self.number)]

    @property
    def exit_status(self) -> int:
        """Exit status of the run: 128 and the signal's number, or 0 when none ended it."""
        return 0 if self.number is None else 128 + self.number

    def install(self, store: Store | None = None, rank: int = 0) -> None:
        """Handle signals from now on.

        Args:
            store: Store of all ranks, through which :meth:`poll` learns what reached another rank; ``None`` for one.
            rank: Rank of this process; the first one says what it does.
        """
        self._rank = rank
        self.number = self._wanted = None
        self._has_interrupt = self._posted = False
        self._store, self._key = store, f"stop/{self._num_installed}"
        self._num_installed += 1
        self._former = {number: signal.signal(number, self._handle) for number in NAMES}
        signal.set_wakeup_fd(-1)  # what end_at_once watches

    def uninstall(self) -> None:
        """Restore the former handlers, and end what :func:`end_at_once` watches; safe to call twice."""
        signal.set_wakeup_fd(-1)
        former, self._former = self._former, {}
        for number, handler in former.items():
            signal.signal(number, handler)

    def poll(self) -> bool:
        """Return whether some rank was told to stop, as far as is known here. Not collective, and quick."""
        with contextlib.suppress(RuntimeError):  # the store's rank is gone, which the next collective reports
            if self._store is None or self._posted:
                pass
            elif self._wanted is not None:  # at once: this may be the last question before a collective
                self._store.set(self._key, str(self._wanted))
                self._posted = True
            elif time.monotonic() >= self._next_poll:
                self._next_poll = time.monotonic() + POLL_S
                if self._store.check([self._key]):
                    self._want(int(self._store.get(self._key)))
        return self._wanted is not None

    def agree(self, gather: Callable[[list[int]], list[int]]) -> bool:
        """Return whether any rank was told to stop, the same on all ranks, whose lists ``gather`` joins. Collective."""
        found = gather([] if self._wanted is None else [self._wanted])
        if found:
            self.number = max(found)  # SIGTERM before Ctrl-C
            self._want(self.number)
        return bool(found)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._has_interrupt:
            raise KeyboardInterrupt
        self._has_interrupt |= number == signal.SIGINT
        self._want(number)

    def _want(self, number: int) -> None:
        if self._wanted is None:
            self._wanted = number
            kind = signal.Signals(number)
            _say(f"{NAMES[kind]}: finishing the phase, then saving.{AGAIN[kind]}", self._rank)


def exit_at_once() -> None:
    """Let Ctrl-C and SIGTERM end this process with status 130 or 143 while it has nothing to close: it imports modules.

    No exception is raised, because an import that one interrupts may drop it or raise another in its place.
    """
    for number in NAMES:
        signal.signal(number, _exit)


def end_at_once(rank: int | None = None) -> None:
    """Let Ctrl-C and SIGTERM end this process by an exception, with status 130 or 143: there is nothing to save yet.

    What was started is closed on the way. A second Ctrl-C ends the process without that, and so does the end of
    ``GRACE_S``: some code may have dropped the exception, or wait where Python cannot raise one, as for other ranks.

    This replaces Lightning's handler of SIGTERM, which begins a collective that the other ranks do not take part in.

    Args:
        rank: Rank of this process, the first of which says that it ends; by default that of its environment.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # schedulers and launchers send it more than once
        signal.signal(signal.SIGINT, lambda *_: _leave(number))
        _say(f"{NAMES[signal.Signals(number)]}: ended; no step was under way.", rank)
        raise SignalExit(128 + number)

    for number in NAMES:
        signal.signal(number, end)
    signal.set_wakeup_fd(_pipe_of_watch(), warn_on_full_buffer=False)


@functools.cache
def _pipe_of_watch() -> int:
    """Start a thread that ends the process ``GRACE_S`` after a signal's number came through a pipe; return its end."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while (number := os.read(reader, 1)[0]) not in NAMES:
            pass
        time.sleep(GRACE_S)
        _say(f"{NAMES[signal.Signals(number)]}: ended without closing what was started.")
        _leave(number)

    threading.Thread(target=watch, name="rlplug-signals", daemon=True).start()
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    return writer


def _leave(number: int) -> None:
    """End the process without closing anything, but show the terminal's cursor, which a live display hides."""
    with contextlib.suppress(OSError):
        if os.isatty(STDERR):
            os.write(STDERR, b"\x1b[?25h")
    os._exit(128 + number)


def _exit(number: int, frame: FrameType | None) -> None:
    _say(f"{NAMES[signal.Signals(number)]}: ended; nothing was started yet.")
    os._exit(128 + number)


def _say(text: str, rank: int | None = None) -> None:
    """Write to stderr on rank 0, without Python's buffer, in whose middle a signal may have come."""
    if rank is None:
        rank = int(next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0"))
    if rank == 0:
        with contextlib.suppress(OSError):
            os.write(STDERR, f"\n{text}\n".encode())
