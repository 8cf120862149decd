"""A network that is away: what rewards ask, judges and verifiers, cannot be reached."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def outage() -> Iterator[list[str]]:
    """Refuse every connection over IP of this process meanwhile; collect the addresses that were asked for."""
    asked: list[str] = []
    own = {name: getattr(socket.socket, name) for name in ("connect", "connect_ex")}

    def is_away(connection: socket.socket, address: Any) -> bool:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        asked.append(":".join(map(str, address[:2])))
        return True

    def connect(connection: socket.socket, address: Any) -> Any:
        if is_away(connection, address):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connections are refused while a check runs")
        return own["connect"](connection, address)

    def connect_ex(connection: socket.socket, address: Any) -> Any:
        return errno.ECONNREFUSED if is_away(connection, address) else own["connect_ex"](connection, address)

    with mock.patch.multiple(socket.socket, connect=connect, connect_ex=connect_ex):
        yield asked
