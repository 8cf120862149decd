"""Starts an engine server, and writes a token to a file once a process of the server listens at its address::

    python -m rlplug_launch.listener ADDRESS PORT FILE TOKEN COMMAND...

A port is free until the server binds it, and on command lines that all users of a host may read: whoever takes it first
answers the health check. This process becomes the server, and the one that looks ends when it has seen it listen.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import psutil
from rlplug_engines.servers.addresses import listens

POLL_S = 0.2


def main() -> NoReturn:
    """Start to look, and become the server."""
    address, port, file, token, *command = sys.argv[1:]
    server = psutil.Process()
    if os.fork() == 0:
        if os.fork() == 0:  # no child of the server, which may wait for its own
            write_when(lambda: listens(server.pid, address, int(port)), server.is_running, file, token)
        os._exit(0)
    os.wait()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and a command inherits that
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"launch.servers.command: {command[0]} cannot be started: {error.strerror}.")


def write_when(is_ready: Callable[[], bool], goes_on: Callable[[], bool], file: str, token: str) -> None:
    """Write a token to a new file as soon as something is ready, unless it does not go on."""
    while goes_on():
        if is_ready():
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(descriptor, token.encode())
            os.close(descriptor)
            return
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
