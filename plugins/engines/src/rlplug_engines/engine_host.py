"""An engine's end of its own process, which :class:`rlplug_engines.colocated.EngineProcess` starts and talks to.

Some engines want a process of their own: they change signal handlers, the environment, and how processes are started,
or kill all processes below the one that they are in. This module is imported there, and loads nothing of the trainer.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, TypeAlias

import psutil

Message: TypeAlias = tuple[Any, ...]
"""A kind and its values. To here: ``submit``, ``abort``, ``call``, ``close``. From here: ``ready``, ``failed``,
``output``, ``load``, ``result``."""

LOAD_INTERVAL_S: Final = 1.0
ABORT_INTERVAL_S: Final = 0.2


class EngineHost(ABC):
    """Hands messages to an engine, and its answers back. All but reading and writing runs in the engine's event loop.

    The trainer calls methods whose names begin with ``call_`` by the rest of their name.

    Args:
        loop: The engine's event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._outgoing: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._running: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Mapping[str, Any]) -> Any:
        """Return the engine's answer to a request, as plain data."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Stop a request. This is repeated until it has ended: an abort may overtake its request and be ignored."""

    @abstractmethod
    async def loads(self) -> Sequence[tuple[int, int, float]]:
        """Return running requests, waiting requests, and share of the KV cache in use, of each scheduler."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the engine."""

    async def serve(self, arrivals: queue.SimpleQueue[Message], send: Callable[[Message], None]) -> None:
        """Do what messages ask for, until one says ``close``."""
        threading.Thread(target=self._write, args=(send,), daemon=True).start()
        self._start(self._observe())
        while True:
            kind, *values = await asyncio.to_thread(arrivals.get)
            if kind == "close":
                return
            if kind == "submit":
                for request_id, prompt_ids, sampling in values[0]:
                    self._running.add(request_id)
                    self._start(self._generate(request_id, prompt_ids, sampling))
            elif kind == "abort":
                for request_id in values[0]:
                    self._start(self._abort(request_id))
            else:
                assert kind == "call", kind
                self._start(self._call(*values))

    def _write(self, send: Callable[[Message], None]) -> None:
        """Send in a thread: a trainer that does not read must not keep the engine's loop from its work."""
        while True:
            send(self._outgoing.get())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._tasks.discard)

    async def _generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Mapping[str, Any]) -> None:
        try:
            self._outgoing.put(("output", request_id, await self.generate(request_id, prompt_ids, sampling), None))
        except Exception as problem:  # noqa: BLE001 - the trainer hears of it
            self._outgoing.put(("output", request_id, None, f"{type(problem).__name__}: {problem}"))
        finally:
            self._running.discard(request_id)

    async def _abort(self, request_id: str) -> None:
        while request_id in self._running:
            await asyncio.sleep(0)
            self.abort(request_id)
            await asyncio.sleep(ABORT_INTERVAL_S)

    async def _observe(self) -> None:
        """Report the schedulers' load while there are requests."""
        while True:
            if self._running:
                try:
                    loads = await self.loads()
                except Exception:  # noqa: BLE001 - tokens come all the same, and the next look may succeed
                    loads = []
                    traceback.print_exc()  # into the engine's log
                for load in loads:
                    self._outgoing.put(("load", *load))
            await asyncio.sleep(LOAD_INTERVAL_S)

    async def _call(self, number: int, name: str, arguments: Sequence[Any]) -> None:
        problem: str | None = None
        try:
            await getattr(self, f"call_{name}")(*arguments)
        except Exception as error:  # noqa: BLE001 - likewise
            problem = f"{type(error).__name__}: {error}"
        self._outgoing.put(("result", number, problem))


def run_host(make: Callable[[dict[str, Any]], tuple[EngineHost, dict[str, int]]]) -> None:
    """Make the engine that the first message describes, and serve until the trainer closes it, or ends.

    Args:
        make: From the engine's arguments to its host, and to what the trainer is told: ``max_num_seqs`` and
            ``kv_cache_tokens``.
    """
    connection: Connection[Message, Any] = Connection(int(sys.argv[-1]))
    arguments: dict[str, Any] = connection.recv()
    arrivals: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, arrivals.put), daemon=True).start()
    try:
        host, about = make(arguments)
    except Exception as problem:
        traceback.print_exc()
        connection.send(("failed", f"{type(problem).__name__}: {problem}"))
        raise SystemExit(1) from problem
    connection.send(("ready", about))
    host.loop.run_until_complete(host.serve(arrivals, connection.send))
    host.shutdown()
    os._exit(0)  # threads of the engine and tasks of its loop need not end one by one


def _read(connection: Connection[Message, Any], put: Callable[[Message], None]) -> None:
    """Hand on what arrives; when the trainer is gone, end all of the engine, whatever it does."""
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            own = psutil.Process()
            for process in [*own.children(recursive=True), own]:
                process.kill()
            return
        put(message)
