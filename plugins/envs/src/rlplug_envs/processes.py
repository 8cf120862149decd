"""Clients of the processes that run verifiers environments; their program is ``rlplug_envs.hosted.server``."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.metadata
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, Final

from packaging.specifiers import SpecifierSet

from rlplug.distributed.child_process import ChildProcess
from rlplug.errors import ConfigError

SUPPORTED: Final = ">=0.2,<0.4"
"""Supported versions of verifiers: before 0.2 the loop was different, and 0.4 no longer has ``load_environment``."""

TIDY_UP_S: Final = 5.0
"""Longest time in seconds for a process to end by itself."""


class EnvironmentFailure(Exception):
    """Error of an environment that cannot go on; its trajectory has no reward."""


@dataclass(frozen=True)
class HostSettings:
    """Settings with which a process is started."""

    environment: str
    arguments: str
    """Arguments of the environment as JSON, so that settings can be compared."""
    refuse_failed_rewards: bool
    start_timeout_s: float
    stall_timeout_s: float


def host_settings(
    part: str,
    environment: str,
    arguments: dict[str, Any] | None,
    refuse_failed_rewards: bool,
    start_timeout_s: float,
    stall_timeout_s: float,
) -> HostSettings:
    """Return checked settings; ``part`` names the class in errors.

    Raises:
        ConfigError: verifiers is missing or has an unsupported version, or a value is out of range.
    """
    _require_verifiers(part)
    for key, value in {"start_timeout_s": start_timeout_s, "stall_timeout_s": stall_timeout_s}.items():
        if value <= 0:
            raise ConfigError(f"{part}.{key} is {value}: give a positive number of seconds.")
    try:
        text = json.dumps(arguments or {}, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{part}.arguments is {arguments!r}: give plain YAML values ({error}).") from error
    return HostSettings(environment, text, refuse_failed_rewards, start_timeout_s, stall_timeout_s)


def _require_verifiers(part: str) -> None:
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"{part} needs the package verifiers: pip install 'rlplug-envs[verifiers]'.") from error
    if not SpecifierSet(SUPPORTED).contains(version, prereleases=True):
        raise ConfigError(
            f"{part} runs with verifiers {SUPPORTED}, and {version} is installed: pip install 'verifiers{SUPPORTED}'. "
            "Releases from 0.4 on have no load_environment, and those before 0.2 have a different loop."
        )


class EnvironmentHost:
    """Process with one environment, started by the constructor; ``wait_ready`` waits until it has loaded."""

    def __init__(self, settings: HostSettings) -> None:
        self.settings = settings
        self.num_trajectories = 0
        self.tools: list[dict[str, Any]] = []
        self._ready: Future[dict[str, Any]] = Future()
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._end: str | None = None
        self._numbers = itertools.count()
        self._outbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        environment = {
            "VF_LOG_LEVEL": "WARNING",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONSAFEPATH": "1",
        }
        command = [sys.executable, "-m", "rlplug_envs.hosted.server"]
        self._process = ChildProcess(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._outbox.put(
            {
                "environment": settings.environment,
                "arguments": json.loads(settings.arguments),
                "refuse_failed_rewards": settings.refuse_failed_rewards,
                "stall_timeout_s": settings.stall_timeout_s,
            }
        )
        threading.Thread(target=self._write, name="rlplug-envs-write", daemon=True).start()
        threading.Thread(target=self._read, name="rlplug-envs-read", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        return self._end is None

    def wait_ready(self) -> None:
        """Wait until the environment has loaded.

        Raises:
            ConfigError: The environment cannot be loaded.
        """
        name = self.settings.environment
        try:
            greeting = self._ready.result(self.settings.start_timeout_s)
        except FutureTimeout as error:
            self.close()
            seconds = self.settings.start_timeout_s
            raise ConfigError(
                f"environment {name!r} was not loaded within {seconds:g} s: raise start_timeout_s."
            ) from error
        except EnvironmentFailure as error:
            raise ConfigError(f"environment {name!r}: {error}") from error
        if "error" in greeting:
            raise ConfigError(f"environment {name!r}: {greeting['error']}.")
        self.tools = greeting["tools"]

    def request(self, message: dict[str, Any]) -> Future[Any]:
        """Send a request, and return a future of its answer, which may be an :class:`EnvironmentFailure`."""
        future: Future[Any] = Future()
        with self._lock:
            if self._end is None:
                number = next(self._numbers)
                self._pending[number] = future
                self._outbox.put({"id": number, **message})
            else:
                future.set_exception(EnvironmentFailure(self._end))
        return future

    def send(self, message: dict[str, Any]) -> None:
        """Send a message without an answer; never blocks."""
        self._outbox.put(message)

    def close(self) -> None:
        """End the process and all that it started, after the environment had time to clean up."""
        self._outbox.put(None)
        self._process.end(TIDY_UP_S)

    def _write(self) -> None:
        assert self._process.stdin is not None
        # a broken pipe means that the process has ended, which the reader reports
        with contextlib.suppress(OSError), self._process.stdin as stdin:
            while (message := self._outbox.get()) is not None:
                stdin.write(json.dumps(message).encode() + b"\n")
                stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                reply = json.loads(line)
                if "id" not in reply:
                    self._ready.set_result(reply)
                    continue
                with self._lock:
                    future = self._pending.pop(reply["id"])
                if "error" in reply:
                    _settle(future, EnvironmentFailure(reply["error"]))
                else:
                    _settle(future, reply["result"])
        code = self._process.end(TIDY_UP_S)
        with self._lock:
            self._end = self._explain(code)
            pending, self._pending = list(self._pending.values()), {}
        for future in [self._ready, *pending]:
            _settle(future, EnvironmentFailure(self._end))

    def _explain(self, code: int) -> str:
        if code == -signal.SIGALRM:
            seconds = self.settings.stall_timeout_s
            return f"the environment kept its process busy for longer than {seconds:g} s (stall_timeout_s)"
        return f"the environment's process ended with code {code}; the log has what it printed"


def _settle(future: Future[Any], outcome: Any) -> None:
    # the waiting caller may have cancelled the future
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, EnvironmentFailure):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


class HostPool:
    """Pool of processes with the same environment, over which trajectories are spread.

    All processes start when the first is needed, and one that ended is replaced.

    Args:
        settings: Settings of every process.
        num_processes: Number of processes.
    """

    def __init__(self, settings: HostSettings, num_processes: int) -> None:
        self._settings = settings
        self._num_processes = num_processes
        self._lock = threading.Lock()
        self._hosts: list[EnvironmentHost] = []
        atexit.register(self.close)

    def acquire(self) -> EnvironmentHost:
        """Return the process with the fewest trajectories, once it has loaded its environment.

        Raises:
            ConfigError: The environment cannot be loaded.
        """
        with self._lock:
            alive = [host for host in self._hosts if host.is_alive]
            # start all at once, so that they load concurrently
            missing = range(self._num_processes - len(alive))
            self._hosts = alive + [EnvironmentHost(self._settings) for _ in missing]
            host = min(self._hosts, key=lambda host: host.num_trajectories)
            host.num_trajectories += 1
        try:
            host.wait_ready()
        except BaseException:
            self.release(host)
            raise
        return host

    def release(self, host: EnvironmentHost) -> None:
        """Record that a trajectory has ended."""
        with self._lock:
            host.num_trajectories -= 1

    def close(self) -> None:
        """End every process."""
        for host in self._hosts:
            host.close()


@functools.cache
def shared_pool(settings: HostSettings, num_processes: int) -> HostPool:
    """Return the one pool with these settings, which the environment objects of all trajectories share."""
    return HostPool(settings, num_processes)
