"""The trainer's end of the process that SGLang runs in (:mod:`rlplug_rollout_sglang.host`)."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from rlplug.interfaces import EngineFault
from rlplug.rollout.engines import is_trainer_variable
from rlplug_rollout_sglang.options import ENVIRONMENT

COMMAND: Final = (sys.executable, "-c", "from rlplug_rollout_sglang.host import main; main()")

CLOSE_S: Final = 90.0
"""SGLang waits up to 60 s for its own processes."""

GONE_S: Final = 10.0
"""Where nobody waits for orphans they stay listed; their GPU is free by then."""

TAIL_BYTES: Final = 3000
STDERR: Final = 2


class EngineProcess:
    """Starts the process, exchanges messages with it over a pipe that no other process has, and ends it.

    Requests may be handed in from any thread; everything else happens in one.

    Args:
        arguments: Of SGLang's ``Engine``.
        start_deadline_s: How long it may take until the engine is ready.
        shows_log: Let SGLang write to the trainer's standard error. If not, the end of it is in messages of faults.
        command: What to run; the descriptor of the pipe is added as its last argument.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        start_deadline_s: float,
        shows_log: bool = False,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._log = None if shows_log else tempfile.TemporaryFile()  # noqa: SIM115 - it lasts as long as the process
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=STDERR if self._log is None else self._log,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,  # so that Ctrl-C reaches the trainer alone, which then closes it
            )
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._outputs: list[tuple[str, dict[str, Any] | None, str | None]] = []
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

    def outputs(self, timeout_s: float) -> list[tuple[str, dict[str, Any] | None, str | None]]:
        """Return ids with SGLang's answers, or with why there is none; wait at most ``timeout_s`` for the first."""
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
                raise EngineFault(f"SGLang did not answer {name!r} within {deadline_s:g} s.{self._tail()}")
        if (problem := self._results.pop(number)) is not None:
            raise EngineFault(f"SGLang failed at {name!r}: {problem}{self._tail()}")

    def close(self) -> None:
        """End the process and all below it; safe to call twice."""
        if self._connection.closed:
            return
        if self.about and self._process.poll() is None:
            with contextlib.suppress(EngineFault, subprocess.TimeoutExpired):  # what is left then ends unasked
                self._send(("close",))
                self._process.wait(CLOSE_S)
        with contextlib.suppress(ProcessLookupError):  # nothing is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._wait_until_gone()
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

    def _wait_until_gone(self) -> None:
        """Wait until the processes below have let their GPU go: another engine may start there at once."""
        deadline = time.monotonic() + GONE_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, 0)
                time.sleep(0.05)

    def _died(self) -> EngineFault:
        try:
            code: int | None = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            code = None
        return EngineFault(f"SGLang's process ended, with exit code {code}.{self._tail()}")

    def _tail(self) -> str:
        """Return the end of what SGLang wrote."""
        if self._log is None:
            return " Its log is above."
        descriptor = self._log.fileno()
        start = max(0, os.fstat(descriptor).st_size - TAIL_BYTES)
        text = os.pread(descriptor, TAIL_BYTES, start).decode(errors="replace").strip()  # seeking would move SGLang too
        return f" It wrote last:\n{text}" if text else " It wrote nothing."


def _environment() -> dict[str, str]:
    """Return the environment of the process: the trainer's, without the trainer's place among its ranks."""
    return {name: value for name, value in os.environ.items() if not is_trainer_variable(name)} | ENVIRONMENT
