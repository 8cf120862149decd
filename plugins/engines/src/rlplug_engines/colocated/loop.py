"""Event loop in a thread of its own, in which the calls of engines run, each with a deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from rlplug.errors import RLPlugError
from rlplug.interfaces.rollout import EngineFault

Result = TypeVar("Result")

STOP_S: Final = 5.0
"""How long a loop that hangs in a call is waited for; its thread does not keep the process from ending."""


class EngineLoop:
    """Runs coroutines for other threads.

    Args:
        engine: Name of the engine, for messages.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-engine", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def spawn(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine, and do not wait for it; those of one thread begin in the order of the calls."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run_all(self, work: Iterable[Awaitable[Result]], name: str, deadline_s: float) -> list[Result]:
        """Run ``work`` at once, and return what each returns.

        Args:
            name: Of the work, for messages.

        Raises:
            EngineFault: It failed, or took longer than ``deadline_s``.
        """
        future = self.spawn(_gathered(work))
        try:
            return future.result(deadline_s)
        except RLPlugError:
            raise
        except Exception as problem:
            if isinstance(problem, TimeoutError) and not future.done():  # else it is the work's own
                future.cancel()
                raise EngineFault(f"{self._engine} did not answer {name!r} within {deadline_s:g} s.") from None
            raise EngineFault(f"{self._engine} failed at {name!r}: {type(problem).__name__}: {problem}") from problem

    def close(self) -> None:
        """Cancel what runs, and stop. A second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel_all)
            self._thread.join(STOP_S)
        if not self._thread.is_alive() and not self._loop.is_closed():
            self._loop.close()

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.call_soon, self._loop.stop)  # when the tasks have seen it


async def _gathered(work: Iterable[Awaitable[Result]]) -> list[Result]:
    return list(await asyncio.gather(*work))
