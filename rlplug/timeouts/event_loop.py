"""Event loop for calls that return awaitables."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

Settle: TypeAlias = Callable[[Awaitable[Any]], Coroutine[Any, Any, None]]
"""Awaits the result of a call, and settles the call."""
GiveUp: TypeAlias = Callable[[], Any]
Ends: TypeAlias = Callable[[], float]
"""Returns when a call ends, as ``time.monotonic()``; infinite while it waits for a place of its own."""


class EventLoop:
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

    def submit(self, awaitable: Awaitable[Any], settle: Settle, give_up: GiveUp, ends: Ends) -> None:
        """Have ``settle`` await a result on this loop as soon as a slot is free; ``give_up`` when it ``ends``."""
        self._loop.call_soon_threadsafe(self._start, awaitable, settle, give_up, ends)
        self.ping()

    def abandon(self) -> None:
        """Stop the loop as soon as the code that blocks it returns."""
        self.abandoned = True
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _start(self, awaitable: Awaitable[Any], settle: Settle, give_up: GiveUp, ends: Ends) -> None:
        if self.abandoned:  # and so is the call
            close_unstarted(awaitable)
            return
        task = self._loop.create_task(self._run_call(awaitable, settle, give_up, ends))
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: close_unstarted(awaitable))

    def _pong(self) -> None:
        self._pinged = None

    def _run(self) -> None:
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(self._loop), return_exceptions=True))
        self._loop.close()

    async def _run_call(self, awaitable: Awaitable[Any], settle: Settle, give_up: GiveUp, ends: Ends) -> None:
        async with self._slots:
            task, left = asyncio.ensure_future(settle(awaitable)), self._deadline_s
            while left > 0 and not task.done():
                # asyncio.timeout would wait on for a call that ignores its cancellation
                await asyncio.wait({task}, timeout=min(left, self._deadline_s))
                left = ends() - time.monotonic()
            give_up()
            task.cancel()


def close_unstarted(awaitable: Any) -> None:
    """Close a coroutine that nothing will await, and those among its arguments, or Python warns of each."""
    if not (inspect.iscoroutine(awaitable) and inspect.getcoroutinestate(awaitable) == inspect.CORO_CREATED):
        return
    arguments = list(inspect.getcoroutinelocals(awaitable).values())
    awaitable.close()
    for argument in arguments:
        for each in argument if isinstance(argument, list) else [argument]:
            close_unstarted(each)
