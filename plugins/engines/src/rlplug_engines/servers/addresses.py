"""Addresses and ports of this host, and who listens there."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final
from urllib.parse import urlsplit

import psutil

LOOPBACK: Final = "127.0.0.1"


def is_loopback(url: str) -> bool:
    """Return whether only this host can reach a URL."""
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def own_address(peer: str) -> str:
    """Return the address of this host that ``peer`` reaches: of IPv4 where the peer has one, else of IPv6."""
    found = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def address_for(urls: Sequence[str]) -> str:
    """Return the address of this host that all servers reach: its loopback, if they all run here."""
    hosts = [urlsplit(url).hostname or "" for url in urls]
    return own_address(next((host for host in hosts if not is_loopback(f"//{host}")), hosts[0]))


def free_ports(count: int, address: str = LOOPBACK) -> list[int]:
    """Return free ports of this host."""
    with ExitStack() as stack:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sockets = [stack.enter_context(socket.socket(family)) for _ in range(count)]
        for each in sockets:
            each.bind((address, 0))
        return [each.getsockname()[1] for each in sockets]


def listens(pid: int, address: str, port: int | None) -> bool:
    """Return whether a process, or one below it, listens on a port of an address of this host.

    One that listens on all addresses of the other family does not count: IPv4's may still be free, or somebody else's.
    """
    try:
        process = psutil.Process(pid)
        return any(_listens(each, address, port) for each in (process, *process.children(recursive=True)))
    except psutil.NoSuchProcess:
        return False


def _listens(process: psutil.Process, address: str, port: int | None) -> bool:
    own = (address, "::" if ":" in address else "0.0.0.0", f"::ffff:{address}")
    try:
        found = process.net_connections("tcp")
    except psutil.Error:  # it has ended, or is another user's
        return False
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.laddr.ip in own for each in found)
