"""CPU time of the processes that answer a server's requests, which may hand over less than its engine generates."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import psutil


class APIProcesses:
    """The processes of started servers that answer requests.

    Args:
        parents: Ids of processes below which the servers' are.
        names: What the command line of a process that answers requests has in it.
    """

    def __init__(self, parents: Sequence[int], names: Sequence[str]) -> None:
        self._processes: list[psutil.Process] = []
        for parent in parents:
            with contextlib.suppress(psutil.NoSuchProcess):  # the next request tells that this server has ended
                below = psutil.Process(parent).children(recursive=True)
                self._processes += [each for each in below if any(name in _command_line(each) for name in names)]
        self._before = self._cpu_seconds()

    def busiest_share(self, seconds: float) -> float:
        """Return the share of a core that the busiest of them has used since the last call.

        Args:
            seconds: Time since the last call in which requests ran.
        """
        before, self._before = self._before, self._cpu_seconds()
        used = [now - before.get(pid, now) for pid, now in self._before.items()]
        return max(used, default=0.0) / seconds if seconds else 0.0

    def _cpu_seconds(self) -> dict[int, float]:
        found = {}
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                found[process.pid] = times.user + times.system
        return found


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
