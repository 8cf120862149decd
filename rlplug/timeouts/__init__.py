"""Executor that runs calls of user code concurrently, each with a timeout, and never waits for one that hangs.

Calls run on daemon threads: those of ``concurrent.futures`` are joined at exit, so that one hung call would keep the
process alive for ever. A call that returns an awaitable continues on an event loop, in one more daemon thread. A call
that misses its deadline is abandoned with its thread: a new thread replaces it, and a late result is dropped.

What a call returns or raises is read there too, within its deadline: a generator is consumed, numbers are converted,
and an exception becomes text, ``SystemExit`` too. The thread that collects the calls touches plain values alone.

Threads are no protection from code that ends the process (``os._exit``, a crash in C) or that never releases the GIL
(a regular expression that backtracks, a power with a billion digits), which blocks these timeouts too. Such code needs
a process of its own, as the sandbox of tools has them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from rlplug.errors import describe

if TYPE_CHECKING:
    from rlplug.timeouts.event_loop import EventLoop


Kind = Literal["late", "raised", "invalid"]


class CallError(Exception):
    """Error that rlplug finds in a call or in what it returned: the text says all, without the name of the class."""


@dataclass(eq=False)
class Call:
    """One call and its outcome: a ``value`` or an ``error``."""

    function: Callable[[], Any]
    read: Callable[[Any], Any]
    """Makes the value of what ``function`` returned, in the same thread, or raises :class:`CallError`."""
    value: Any = None
    error: str = ""
    """What went wrong; empty if nothing did."""
    kind: Kind = "late"
    """Kind of the error: of the deadline, of ``function``, or of what it returned."""
    settled: bool = False
    worker: threading.Thread | None = None
    """Thread that runs the call; ``None`` while it waits, and while it is on an event loop."""
    started: float = 0.0
    """``time.monotonic()`` at the start in ``worker``, or after its last wait; infinite in a wait."""
    num_waits: int = 0
    seconds: float = 0.0
    """Duration in seconds, once the call is settled."""
    loop: EventLoop | None = None
    """Event loop that awaits the result; ``None`` for a call that runs on a thread."""


_RUNNING: Final[ContextVar[Call]] = ContextVar("call")


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Stop the clock of the call that this thread or task runs, while it waits for a place: its time begins after."""
    if (call := _RUNNING.get(None)) is None or call.settled:
        yield
        return
    call.num_waits, call.started = call.num_waits + 1, math.inf
    try:
        yield
    finally:
        call.num_waits -= 1
        call.started = math.inf if call.num_waits else time.monotonic()


def is_given_up() -> bool:
    """Return whether the call that this thread or task runs was late, so that nobody waits for it."""
    return (call := _RUNNING.get(None)) is not None and call.settled


class TimeoutExecutor:
    """Executor of calls with a timeout: a list of them with :meth:`run`, or more over time with :meth:`add`.

    Args:
        deadline_s: Longest time for one call in seconds, from when it starts to run, or after a :func:`waiting`.
        max_concurrency: Largest number of calls on threads at a time, and also on the event loop.
    """

    def __init__(self, deadline_s: float, max_concurrency: int) -> None:
        self.deadline_s = deadline_s
        self.max_concurrency = max_concurrency
        self._tick_s = min(deadline_s / 10, 0.25)
        self._lock = threading.RLock()
        self._loop: EventLoop | None = None
        self._abandoned: list[threading.Thread] = []

    @property
    def num_abandoned(self) -> int:
        """Number of abandoned threads that still run."""
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        return len(self._abandoned)

    def run(self, functions: Sequence[Callable[[], Any]], reads: Sequence[Callable[[Any], Any]]) -> list[Call]:
        """Call all functions and return their calls in the same order, each of them settled.

        Args:
            functions: The functions, which may return awaitables.
            reads: For each, what makes the call's value of what it returned (or awaited), within the deadline.
        """
        batch = CallBatch()
        calls = self.add(batch, functions, reads)
        self.finish([batch])
        return calls

    def finish(self, batches: Sequence[CallBatch]) -> None:
        """Wait until all calls of batches, which run side by side, are settled, and abandon late ones."""
        try:
            while unsettled := [batch for batch in batches if batch.num_unsettled]:
                for batch in unsettled:
                    self.settled(batch, self._tick_s / len(unsettled))
        finally:
            for batch in batches:
                batch.drop_waiting()  # so that the workers stop after a KeyboardInterrupt

    def add(
        self, batch: CallBatch, functions: Sequence[Callable[[], Any]], reads: Sequence[Callable[[Any], Any]]
    ) -> list[Call]:
        """Add functions to ``batch`` and return their calls, which are not settled yet; as in :meth:`run`."""
        calls = [batch.put(Call(function, read)) for function, read in zip(functions, reads, strict=True)]
        while batch.wants_worker(self.max_concurrency):  # the first threads may run all calls, if these are quick
            self._start_worker(batch)
        return calls

    def settled(self, batch: CallBatch, timeout_s: float) -> list[Call]:
        """Return newly settled calls, waiting up to ``timeout_s`` for the first, and abandon late ones."""
        ends_at = time.monotonic() + timeout_s
        while True:
            self._give_up_overdue(batch)
            left = ends_at - time.monotonic()
            if (found := batch.take_settled(max(0.0, min(left, self._tick_s)))) or left <= 0:
                return found

    def _start_worker(self, batch: CallBatch) -> None:
        threading.Thread(target=self._work, args=(batch,), name="rlplug-call", daemon=True).start()

    def _work(self, batch: CallBatch) -> None:
        while (call := batch.take()) is not None:
            _RUNNING.set(call)
            try:
                value = call.function()
                is_awaitable = inspect.isawaitable(value)
                value = value if is_awaitable else call.read(value)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to this call alone
                in_time = batch.settle(call, None, *_failure_of(error))
            else:
                in_time = self._hand_to_loop(batch, call, value) if is_awaitable else batch.settle(call, value=value)
            value = None  # what a call returned must not stay alive in an idle thread
            if not in_time:
                return  # the call was abandoned: another worker has replaced this one

    def _hand_to_loop(self, batch: CallBatch, call: Call, awaitable: Awaitable[Any]) -> bool:
        from rlplug.timeouts.event_loop import EventLoop, close_unstarted

        late = f"took longer than {self.deadline_s:g} s"
        with self._lock:
            if self._loop is not None and self._loop.is_blocked:
                self._abandon(self._loop)
            if self._loop is None or self._loop.abandoned:
                self._loop = EventLoop(self.deadline_s, self.max_concurrency)
            if batch.move_to_loop(call, self._loop):
                give_up = functools.partial(batch.settle, call, error=late)
                settle, ends = functools.partial(_settle_with, batch, call), lambda: call.started + self.deadline_s
                self._loop.submit(awaitable, settle, give_up, ends)
                return True
        close_unstarted(awaitable)
        return False

    def _give_up_overdue(self, batch: CallBatch) -> None:
        abandoned = batch.give_up_overdue(self.deadline_s)
        self._abandoned += abandoned
        for _ in abandoned:
            self._start_worker(batch)
        for call in batch.unsettled_on_loop():
            assert call.loop is not None
            call.loop.ping()
            if call.loop.is_blocked:
                text = f"took longer than {self.deadline_s:g} s on an event loop that an async function blocks"
                batch.settle(call, error=f"{text}: await instead of making blocking calls")
                self._abandon(call.loop)

    def _abandon(self, loop: EventLoop) -> None:
        with self._lock:
            if not loop.abandoned:
                loop.abandon()
                self._abandoned.append(loop.thread)


class CallBatch:
    """Calls that run on the same worker threads, of which there are ``max_calls`` at most, where that is given."""

    def __init__(self, max_calls: int | None = None) -> None:
        self._max_calls = max_calls or sys.maxsize
        self.waiting: deque[Call] = deque()
        self._num_workers = 0
        self.num_unsettled = 0
        self._running: dict[int, Call] = {}
        """Calls that have started and are not settled; a deadline concerns these alone."""
        self._settled: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._lock = threading.RLock()

    def put(self, call: Call) -> Call:
        """Queue a call until a thread is free, and return it."""
        with self._lock:
            self.num_unsettled += 1
            self.waiting.append(call)
        return call

    def wants_worker(self, limit: int) -> bool:
        """Return whether to start one more thread (a call waits and fewer than ``limit`` run), and count it."""
        with self._lock:
            wanted = bool(self.waiting) and self._num_workers < min(limit, self._max_calls)
            self._num_workers += wanted
            return wanted

    def take_settled(self, timeout_s: float) -> list[Call]:
        """Return newly settled calls, waiting up to ``timeout_s`` for the first."""
        found: list[Call] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._settled.get(timeout=timeout_s))
            while True:
                found.append(self._settled.get_nowait())
        return found

    def take(self) -> Call | None:
        """Return the next call for this thread and start its clock; return ``None`` when the thread can end."""
        with self._lock:
            if not self.waiting:
                self._num_workers -= 1
                return None
            call = self.waiting.popleft()
            call.worker, call.started = threading.current_thread(), time.monotonic()
            self._running[id(call)] = call
            return call

    def drop_waiting(self) -> None:
        with self._lock:
            self.waiting.clear()

    def move_to_loop(self, call: Call, loop: EventLoop) -> bool:
        """Move a call from its thread to an event loop; return false when the call was abandoned before."""
        with self._lock:
            if not call.settled:
                call.worker, call.loop = None, loop
            return not call.settled

    def unsettled_on_loop(self) -> list[Call]:
        with self._lock:
            return [call for call in self._running.values() if call.loop is not None]

    def settle(self, call: Call, value: Any = None, error: str = "", kind: Kind = "late") -> bool:
        """Record the outcome of a call; return false when the call was abandoned before."""
        with self._lock:
            if call.settled:
                return False
            call.value, call.error, call.kind, call.settled = value, error, kind, True
            call.seconds = time.monotonic() - call.started
            self.num_unsettled -= 1
            self._running.pop(id(call), None)
            self._settled.put(call)
            return True

    def give_up_overdue(self, deadline_s: float) -> list[threading.Thread]:
        """Settle the calls that missed their deadline, and return the threads that still run them."""
        latest_start = time.monotonic() - deadline_s
        with self._lock:
            overdue = [c for c in self._running.values() if c.worker is not None and c.started < latest_start]
            late = f"took longer than {deadline_s:g} s"
            return [call.worker for call in overdue if call.worker is not None and self.settle(call, None, late)]


async def _settle_with(batch: CallBatch, call: Call, awaitable: Awaitable[Any]) -> None:
    call.started = time.monotonic()
    _RUNNING.set(call)
    try:
        value = call.read(await awaitable)
    except BaseException as error:  # noqa: BLE001 - a SystemExit would end the loop under all other calls
        batch.settle(call, None, *_failure_of(error))
    else:
        batch.settle(call, value=value)


def call_within(deadline_s: float, function: Callable[[], Any]) -> Any:
    """Return what a function returns, which runs in a thread of its own and raises here what it raises there.

    Raises:
        CallError: It took longer than ``deadline_s`` seconds; its thread is left behind.
    """
    raised: list[BaseException] = []

    def run() -> Any:
        try:
            return function()
        except BaseException as error:
            raised.append(error)
            raise

    (call,) = TimeoutExecutor(deadline_s, 1).run([run], [lambda value: value])
    if raised and call.error:  # a panic of Rust is no Exception
        raise raised[0] if isinstance(raised[0], Exception) else RuntimeError(describe(raised[0]))
    if call.error:
        raise CallError(call.error)
    return call.value


def _failure_of(error: BaseException) -> tuple[str, Kind]:
    return (str(error), "invalid") if type(error) is CallError else (describe(error, with_line=True), "raised")
