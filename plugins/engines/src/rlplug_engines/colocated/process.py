"""The trainer's end of an engine's own process; the other end is :mod:`rlplug_engines.engine_host`."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from rlplug.distributed.child_process import ChildProcess, tail
from rlplug.interfaces.rollout import EngineFault
from rlplug_engines.colocated.environment import is_trainer_variable

CLOSE_S: Final = 90.0
"""An engine may wait for its own processes; SGLang does for up to 60 s."""

GONE_S: Final = 10.0
"""Where nobody waits for orphans they stay listed; their GPU is free by then."""

STDERR: Final = 2


class EngineProcess:
    """Starts an engine's process, exchanges messages with it over a pipe that no other process has, and ends it.

    Requests may be handed in from any thread; everything else happens in one.

    Args:
        engine: Name of the engine, for messages.
        command: Runs :func:`rlplug_engines.engine_host.run_host`; the pipe's descriptor is added as its last argument.
        environment: Variables beside the trainer's own, without those of its rank.
        arguments: Of the engine; plain data.
        start_deadline_s: How long it may take until the engine is ready.
        shows_log: Let the engine write to the trainer's standard error. If not, messages of faults have the end of it.
    """

    def __init__(
        self,
        engine: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        arguments: Mapping[str, Any],
        start_deadline_s: float,
        shows_log: bool = False,
    ) -> None:
        self._engine = engine
        self._log = None if shows_log else tempfile.NamedTemporaryFile()  # noqa: SIM115 - it lasts as the process does
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = ChildProcess(
                [*command, str(theirs.fileno())],
                None if self._log is None else Path(self._log.name),
                pass_fds=[theirs.fileno()],
                env={**{n: v for n, v in os.environ.items() if not is_trainer_variable(n)}, **environment},
                **({"stdout": STDERR} if self._log is None else {}),
            )
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._outputs: list[tuple[str, Any, str | None]] = []
        self._results: dict[int, str | None] = {}
        self.loads: list[tuple[int, int, float]] = []
        """Running requests, waiting requests, and share of the KV cache in use, about once a second."""
        self.about: dict[str, int] = {}
        """Of the engine: ``kv_cache_tokens`` and ``max_num_seqs``."""
        try:
            self._send(dict(arguments))
            self._wait_until_ready(start_deadline_s)
        except BaseException:
            self.close()
            raise

    def submit(self, requests: Sequence[tuple[str, Sequence[int], Mapping[str, Any]]]) -> None:
        """Hand in requests: unique ids of equal length, prompts, and sampling arguments."""
        self._send(("submit", [(name, list(ids), dict(sampling)) for name, ids, sampling in requests]))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; each still comes back, with what it has."""
        self._send(("abort", list(request_ids)))

    def outputs(self, timeout_s: float) -> list[tuple[str, Any, str | None]]:
        """Return ids with the engine's answers, or with why there is none; wait at most ``timeout_s`` for the first."""
        deadline = time.monotonic() + timeout_s
        while not self._outputs and self._receive(deadline - time.monotonic()):
            pass
        while self._receive(0.0):
            pass
        outputs, self._outputs = self._outputs, []
        return outputs

    def call(self, name: str, *arguments: Any, deadline_s: float) -> None:
        """Have the host do something, and wait until it is done.

        Raises:
            EngineFault: It failed, or took too long.
        """
        number, deadline = next(self._numbers), time.monotonic() + deadline_s
        self._send(("call", number, name, arguments))
        while number not in self._results:
            if not self._receive(deadline - time.monotonic()):
                raise EngineFault(f"{self._engine} did not answer {name!r} within {deadline_s:g} s.{self._tail()}")
        if (problem := self._results.pop(number)) is not None:
            raise EngineFault(f"{self._engine} failed at {name!r}: {problem}{self._tail()}")

    def close(self) -> None:
        """End the process and all below it; safe to call twice."""
        if self._connection.closed:
            return
        grace_s = 0.0
        if self.about and self._process.poll() is None:
            with contextlib.suppress(EngineFault):  # it ends unasked then
                self._send(("close",))
                grace_s = CLOSE_S
        self._process.end(grace_s, GONE_S)  # another engine may start on its GPU at once
        self._connection.close()
        if self._log is not None:
            self._log.close()

    # ---- messages -------------------------------------------------------------------------------------------------

    def _wait_until_ready(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while not self.about:
            if not self._receive(deadline - time.monotonic()):
                raise EngineFault(f"it was not ready within {deadline_s:g} s.{self._tail()}")

    def _send(self, message: Any) -> None:
        with self._sending:
            try:
                self._connection.send(message)
            except OSError as problem:
                raise self._died() from problem

    def _receive(self, timeout_s: float) -> bool:
        """Take one message; return whether there was one in time."""
        try:
            if not self._connection.poll(max(timeout_s, 0.0)):
                return False
            kind, *values = self._connection.recv()
        except (EOFError, OSError) as problem:
            raise self._died() from problem
        if kind == "output":
            self._outputs.append((values[0], values[1], values[2]))
        elif kind == "load":
            self.loads.append((values[0], values[1], values[2]))
        elif kind == "result":
            self._results[values[0]] = values[1]
        elif kind == "ready":
            self.about = values[0]
        else:
            assert kind == "failed", kind
            raise EngineFault(f"{values[0]}.{self._tail()}")
        return True

    def _died(self) -> EngineFault:
        try:
            code: int | None = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            code = None
        return EngineFault(f"{self._engine}'s process ended, with exit code {code}.{self._tail()}")

    def _tail(self) -> str:
        """Return the end of what the engine wrote."""
        if self._log is None:
            return " Its log is above."
        text = tail(Path(self._log.name))
        return f" It wrote last:\n{text}" if text else " It wrote nothing."
