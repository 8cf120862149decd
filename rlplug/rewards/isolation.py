"""Child processes for verifiers that evaluate what a model wrote.

math-verify and reasoning-gym pass completions to sympy (and some tasks to ``eval``), which holds the GIL:
``9^{9^{9}}`` in one completion would block every thread of the trainer, its deadlines included. A child has its own
GIL, its own memory limit, and an alarm with which the kernel ends it when one sample takes too long.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, Final

from rlplug.types import RewardError

SCRIPT: Final = Path(__file__).with_name("scorer_process.py")
CHILD_ENVIRONMENT: Final = {
    "PYTHONSAFEPATH": "1",  # a script's own folder would come first in the module search path
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class ScorerPool:
    """Pool of child processes that score one sample at a time each, started when they are needed.

    Args:
        scorer: A name in :data:`rlplug.rewards.scorer_process.SCORERS`.
        num_processes: Largest number of children.
        timeout_s: Longest time for one sample in seconds, after which its child is ended and replaced.
    """

    def __init__(self, scorer: str, num_processes: int, timeout_s: float) -> None:
        self._arguments = (scorer, num_processes, timeout_s)
        self._timeout_s = timeout_s
        self._children: list[subprocess.Popen[bytes]] = []
        # last in, first out: sequential calls use the same child
        self._idle: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        for _ in range(num_processes):
            self._idle.put(None)
        weakref.finalize(self, _end, self._children)

    def __reduce__(self) -> tuple[type[ScorerPool], tuple[str, int, float]]:
        return ScorerPool, self._arguments  # a copy has its own children

    def score(self, *request: Any) -> float | RewardError:
        """Return the score of one sample, waiting for a free child first."""
        message = pickle.dumps(request)
        child = self._idle.get()
        try:
            if child is None:
                child = self._start()
            reply = _ask(child, message)
            if reply is None:
                ended, child = child, None
                return self._explain_end(ended)
        except BaseException:
            child = None  # it may hold half a message, so another one replaces it
            raise
        finally:
            self._idle.put(child)
        return RewardError(reply["error"]) if "error" in reply else float(reply["score"])

    def _start(self) -> subprocess.Popen[bytes]:
        scorer, _, timeout_s = self._arguments
        child = subprocess.Popen(
            [sys.executable, str(SCRIPT), scorer, str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **CHILD_ENVIRONMENT},
        )
        self._children.append(child)
        return child

    def _explain_end(self, child: subprocess.Popen[bytes]) -> RewardError:
        _end([child])
        self._children.remove(child)
        if child.returncode == -signal.SIGALRM:
            return RewardError(f"took longer than {self._timeout_s:g} s (timeout_s)")
        return RewardError(f"the scoring process ended with code {child.returncode}; the log has what it printed")


def _ask(child: subprocess.Popen[bytes], message: bytes) -> dict[str, Any] | None:
    """Return the child's reply, or ``None`` when the child ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(message)
        child.stdin.flush()
    except BrokenPipeError:
        return None
    line = child.stdout.readline()
    reply: dict[str, Any] | None = json.loads(line) if line else None
    return reply


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    """Close the children's input, at which they end; a busy child ends at its alarm."""
    for child in children:
        assert child.stdin is not None
        with contextlib.suppress(OSError):  # closing flushes, and the child may have ended
            child.stdin.close()
    for child in children:
        assert child.stdout is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=1)
            child.stdout.close()
