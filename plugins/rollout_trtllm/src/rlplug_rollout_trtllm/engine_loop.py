"""An event loop in a thread of its own, in which the calls of engines run, each with a deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from rlplug.errors import RLPlugError
from rlplug.interfaces import EngineFault

Value = TypeVar("Value")

STOP_S: Final = 5.0
"""How long a loop that hangs in a call is waited for; its thread does not keep the process from ending."""


class EngineLoop:
    """Runs coroutines for other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-trtllm", daemon=True)
        self._thread.start()

    def spawn(self, work: Coroutine[Any, Any, Value]) -> Future[Value]:
        """Start something, and do not wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run_all(self, work: Iterable[Awaitable[Value]], name: str, deadline_s: float) -> list[Value]:
        """Return what all of ``work`` returns, which runs at once.

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
                raise EngineFault(f"TensorRT-LLM did not answer {name!r} within {deadline_s:g} s.") from None
            raise EngineFault(f"TensorRT-LLM failed at {name!r}: {type(problem).__name__}: {problem}") from problem

    def close(self) -> None:
        """Stop; what runs is given up."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel_all)
            self._thread.join(STOP_S)
        if not self._thread.is_alive() and not self._loop.is_closed():
            self._loop.close()

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.call_soon, self._loop.stop)  # when the tasks have seen it


async def _gathered(work: Iterable[Awaitable[Value]]) -> list[Value]:
    return list(await asyncio.gather(*work))
