"""Names by which a server of this package may be called: a page that rebinds DNS would use its own."""

from __future__ import annotations

import ipaddress
import socket


def allowed_hosts(host: str) -> frozenset[str]:
    """Return the names, beside addresses, by which a server that listens on ``host`` may be called."""
    names = {"localhost", host}
    if not is_loopback(host):
        names |= {socket.gethostname(), socket.getfqdn()}
    return frozenset(name.lower() for name in names)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_own(host: str, names: frozenset[str]) -> bool:
    """Return whether a ``Host`` header is a name of this server or an address, which no DNS answer can change."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    name = name.removeprefix("[").removesuffix("]").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names
    return True
