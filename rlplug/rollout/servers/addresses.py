"""Hosts and ports: which are this host's own, and which others reach."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final
from urllib.parse import urlsplit

LOOPBACK: Final = "127.0.0.1"


def is_loopback(url: str) -> bool:
    """Whether a URL is of this host alone."""
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def own_address(peer: str) -> str:
    """Return the address of this host that ``peer`` reaches."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # sends nothing
        return str(probe.getsockname()[0])


def address_for(urls: Sequence[str]) -> str:
    """Return the address of this host that all servers reach: its own loopback, if they are all here."""
    hosts = [urlsplit(url).hostname or "" for url in urls]
    return own_address(next((host for host in hosts if not is_loopback(f"//{host}")), hosts[0]))


def free_ports(count: int, address: str = LOOPBACK) -> list[int]:
    """Return ports of this host that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((address, 0))
        return [each.getsockname()[1] for each in sockets]
