"""Scoring of samples by libraries that evaluate what a model wrote, in the sandbox of tools.

math-verify and reasoning-gym pass completions to sympy, and some tasks to ``eval``: code that a policy wrote, which may
run for ever, fill the memory, or look for a better score than it deserves. Each sample is scored in a process of its
own, with the limits and isolation of :mod:`rlplug_sandbox.sandbox`: not as root, without a network, the trainer's
environment variables, and, where the machine allows, any file but Python's.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
from pathlib import Path
from typing import Any, Final

from rlplug_sandbox.sandbox import Limits, SandboxError, ToolPool

from rlplug.errors import ConfigError
from rlplug.types import RewardError

MODULE: Final = Path(__file__).with_name("scorer_process.py")
MEMORY_MIB: Final = 4096
"""Memory limit of a process. A number with billions of digits raises MemoryError before it fills the host."""
MAX_PROCESSES: Final = 16
MESSAGE_CHARS: Final = 500
VARIABLES: Final = frozenset(
    {"PATH", "HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"}
    | {"PYTHONPATH", "PYTHONHOME"}
)
"""Environment variables that a scorer gets: what Python needs to start, and nothing that may be a secret."""


class ScorerPool:
    """Pool of worker processes that score one sample at a time each, started when they are needed.

    Args:
        scorer: A name in :data:`rlplug_rewards.scorer_process.SCORERS`.
        num_processes: Largest number of workers.
        timeout_s: Longest time for one sample in seconds.
    """

    def __init__(self, scorer: str, num_processes: int, timeout_s: float) -> None:
        self._arguments = (scorer, num_processes, timeout_s)
        self._function = f"{MODULE.stem}.{scorer}"
        self._pool = ToolPool(
            [self._function],
            Limits(timeout_s, MEMORY_MIB, MESSAGE_CHARS, MAX_PROCESSES, network=False, folders=(str(MODULE.parent),)),
            num_processes,
            environment={name: value for name, value in os.environ.items() if name in VARIABLES},
            # this package, whose answers need no rlplug: its import would load torch
            module_path=[*sys.path, str(MODULE.parent), str(MODULE.parents[1])],
        )

    def __reduce__(self) -> tuple[type[ScorerPool], tuple[str, int, float]]:
        return ScorerPool, self._arguments  # a copy has its own workers

    def isolation(self) -> str:
        """Start a worker, and return how scoring is isolated.

        Raises:
            ConfigError: Samples cannot be scored here.
        """
        try:
            self._pool.check()
        except SandboxError as error:
            raise ConfigError(f"the scorer {self._arguments[0]} cannot run. {error}") from error
        return self._pool.isolation

    def score(self, *request: Any) -> float | RewardError:
        """Return the score of one sample, waiting for a free worker first."""
        arguments = {"request": base64.b64encode(pickle.dumps(request)).decode()}
        try:
            result = self._pool.call(self._function, arguments, seed="0")
        except SandboxError as error:
            return RewardError(str(error))
        if not result.is_error:
            return float(result.text)
        if result.text.startswith("took longer than"):
            return RewardError(f"{result.text} (timeout_s)", "late")
        return RewardError(result.text)
