"""Executor that runs calls of user code concurrently, each with a timeout, and never waits for one that hangs.

Calls run on daemon threads: those of ``concurrent.futures`` are joined at exit, so that one hung call would keep the
process alive for ever. A call that returns an awaitable continues on an event loop, in one more daemon thread. A call
that misses its deadline is abandoned with its thread: a new thread replaces it, and a late result is dropped.

A call that never releases the GIL (a regular expression that backtracks, a power with a billion digits) blocks these
timeouts too. Such code needs a process of its own, see :mod:`rlplug.rewards.isolation`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any


class DeadlineError(Exception):
    """Error of a call that took longer than its deadline."""


@dataclass(eq=False)
class Call:
    """One call and its outcome: a ``value`` or an ``error``."""

    function: Callable[[], Any]
    value: Any = None
    error: BaseException | None = None
    settled: bool = False
    worker: threading.Thread | None = None
    """Thread that runs the call; ``None`` while it waits, and while it is on an event loop."""
    started: float = 0.0
    """``time.monotonic()`` at the start in ``worker``."""
    seconds: float = 0.0
    """Duration in seconds, once the call is settled."""
    loop: _EventLoop | None = None
    """Event loop that awaits the result; ``None`` for a call that runs on a thread."""


class TimeoutExecutor:
    """Executor of calls with a timeout: a list of them with :meth:`run`, or more over time with :meth:`add`.

    Args:
        deadline_s: Longest time for one call in seconds, from when it starts to run.
        max_concurrency: Largest number of calls on threads at a time, and also on the event loop.
    """

    def __init__(self, deadline_s: float, max_concurrency: int) -> None:
        self.deadline_s = deadline_s
        self.max_concurrency = max_concurrency
        self._tick_s = min(deadline_s / 10, 0.25)
        self._lock = threading.RLock()
        self._loop: _EventLoop | None = None
        self._abandoned: list[threading.Thread] = []

    @property
    def num_abandoned(self) -> int:
        """Number of abandoned threads that still run."""
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        return len(self._abandoned)

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Call]:
        """Call all functions and return their calls in the same order, each of them settled."""
        batch = CallBatch()
        calls = self.add(batch, functions)
        try:
            while batch.num_unsettled:
                self.settled(batch, self._tick_s)
        finally:
            batch.drop_waiting()  # so that the workers stop after a KeyboardInterrupt
        return calls

    def add(self, batch: CallBatch, functions: Sequence[Callable[[], Any]]) -> list[Call]:
        """Add functions to ``batch`` and return their calls, which are not settled yet."""
        calls = [batch.put(function) for function in functions]
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
            try:
                value = call.function()
            except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to this call alone
                in_time = batch.settle(call, error=error)
            else:
                if inspect.isawaitable(value):
                    in_time = self._hand_to_loop(batch, call, value)
                else:
                    in_time = batch.settle(call, value=value)
            if not in_time:
                return  # the call was abandoned: another worker has replaced this one

    def _hand_to_loop(self, batch: CallBatch, call: Call, awaitable: Awaitable[Any]) -> bool:
        with self._lock:
            if self._loop is not None and self._loop.is_blocked:
                self._abandon(self._loop)
            if self._loop is None or self._loop.abandoned:
                self._loop = _EventLoop(self.deadline_s, self.max_concurrency)
            if batch.move_to_loop(call, self._loop):
                self._loop.submit(batch, call, awaitable)
                return True
        if inspect.iscoroutine(awaitable):
            awaitable.close()  # or Python warns that it was never awaited
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
                batch.settle(call, error=DeadlineError(f"{text}: await instead of making blocking calls"))
                self._abandon(call.loop)

    def _abandon(self, loop: _EventLoop) -> None:
        with self._lock:
            if not loop.abandoned:
                loop.abandon()
                self._abandoned.append(loop.thread)


class CallBatch:
    """Calls that run on the same worker threads."""

    def __init__(self) -> None:
        self.waiting: deque[Call] = deque()
        self._num_workers = 0
        self._unsettled: dict[int, Call] = {}
        self._settled: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._lock = threading.Lock()

    @property
    def num_unsettled(self) -> int:
        return len(self._unsettled)

    def put(self, function: Callable[[], Any]) -> Call:
        """Queue a call until a thread is free, and return it."""
        call = Call(function)
        with self._lock:
            self._unsettled[id(call)] = call
            self.waiting.append(call)
        return call

    def wants_worker(self, limit: int) -> bool:
        """Return whether to start one more thread (a call waits and fewer than ``limit`` run), and count it."""
        with self._lock:
            wanted = bool(self.waiting) and self._num_workers < limit
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
            return call

    def drop_waiting(self) -> None:
        with self._lock:
            self.waiting.clear()

    def move_to_loop(self, call: Call, loop: _EventLoop) -> bool:
        """Move a call from its thread to an event loop; return false when the call was abandoned before."""
        with self._lock:
            if not call.settled:
                call.worker, call.loop = None, loop
            return not call.settled

    def unsettled_on_loop(self) -> list[Call]:
        with self._lock:
            return [call for call in self._unsettled.values() if call.loop is not None]

    def settle(self, call: Call, value: Any = None, error: BaseException | None = None) -> bool:
        """Record the outcome of a call; return false when the call was abandoned before."""
        with self._lock:
            return self._settle(call, value, error)

    def give_up_overdue(self, deadline_s: float) -> list[threading.Thread]:
        """Settle the calls that missed their deadline, and return the threads that still run them."""
        latest_start = time.monotonic() - deadline_s
        with self._lock:
            overdue = [c for c in self._unsettled.values() if c.worker is not None and c.started < latest_start]
            late = DeadlineError(f"took longer than {deadline_s:g} s")
            return [call.worker for call in overdue if call.worker is not None and self._settle(call, None, late)]

    def _settle(self, call: Call, value: Any, error: BaseException | None) -> bool:
        if call.settled:
            return False
        call.value, call.error, call.settled = value, error, True
        call.seconds = time.monotonic() - call.started
        del self._unsettled[id(call)]
        self._settled.put(call)
        return True


class _EventLoop:
    """Event loop on a daemon thread, which detects when a coroutine blocks it."""

    def __init__(self, deadline_s: float, max_concurrency: int) -> None:
        self.abandoned = False
        self._deadline_s = deadline_s
        self._slots = asyncio.Semaphore(max_concurrency)
        self._pinged: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="rlplug-call-loop", daemon=True)
        self.thread.start()

    @property
    def is_blocked(self) -> bool:
        """Whether the loop has not answered a ping within the deadline of a call."""
        pinged = self._pinged
        return self.abandoned or (pinged is not None and time.monotonic() - pinged > self._deadline_s)

    def ping(self) -> None:
        """Send the loop a ping to answer, unless an earlier one is still unanswered."""
        if self._pinged is None and not self.abandoned:
            self._pinged = time.monotonic()
            self._loop.call_soon_threadsafe(self._pong)

    def submit(self, batch: CallBatch, call: Call, awaitable: Awaitable[Any]) -> None:
        """Run a call on this loop as soon as a slot is free."""
        self._loop.call_soon_threadsafe(self._start, self._run_call(batch, call, awaitable))
        self.ping()

    def abandon(self) -> None:
        """Stop the loop as soon as the code that blocks it returns."""
        self.abandoned = True
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)

    def _pong(self) -> None:
        self._pinged = None

    def _run(self) -> None:
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(self._loop), return_exceptions=True))
        self._loop.close()

    async def _run_call(self, batch: CallBatch, call: Call, awaitable: Awaitable[Any]) -> None:
        async with self._slots:
            task = asyncio.ensure_future(_settle_with(batch, call, awaitable))
            # asyncio.timeout would wait on for a call that ignores its cancellation
            await asyncio.wait({task}, timeout=self._deadline_s)
            batch.settle(call, error=DeadlineError(f"took longer than {self._deadline_s:g} s"))
            task.cancel()


async def _settle_with(batch: CallBatch, call: Call, awaitable: Awaitable[Any]) -> None:
    try:
        value = await awaitable
    except BaseException as error:  # noqa: BLE001 - a SystemExit would end the loop under all other calls
        batch.settle(call, error=error)
    else:
        batch.settle(call, value=value)
