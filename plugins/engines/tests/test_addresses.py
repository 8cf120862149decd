"""Which addresses are this host's own, and which ports are free."""

from __future__ import annotations

import socket

import pytest
from rlplug_engines.servers.addresses import address_for, free_ports, is_loopback, own_address


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "http://127.3.2.1", "http://localhost:1", "http://[::1]:8000"]
)
def test_urls_of_this_host_alone(url: str) -> None:
    assert is_loopback(url)


@pytest.mark.parametrize("url", ["http://10.0.0.7:8000", "https://localhost.example.org", "http://0.0.0.0:8000"])
def test_urls_that_others_reach(url: str) -> None:
    assert not is_loopback(url)


def test_servers_here_reach_the_trainer_over_loopback() -> None:
    assert address_for(["http://127.0.0.1:8000", "http://127.0.0.1:8001"]) == "127.0.0.1"
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_servers_with_an_ipv6_address_have_a_peer() -> None:
    """Alone catches a weight sync that ends with gaierror, because the address was taken for one of IPv4."""
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    assert address_for(["http://[::1]:8000", "http://[::1]:8001"]) == "::1"
    (port,) = free_ports(1, "::1")
    with socket.create_server(("::1", port), family=socket.AF_INET6):
        pass


def test_free_ports_are_different_and_can_be_listened_on() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
