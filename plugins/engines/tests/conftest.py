"""A small server in a process of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import ForkedProcess
from rlplug_engines.servers.addresses import free_ports
from rlplug_engines.servers.http_client import HTTPClient

SCRIPT = Path(__file__).with_name("tiny_server.py")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    (port,) = free_ports(1)
    process = ForkedProcess([sys.executable, SCRIPT, str(port)])
    yield f"http://127.0.0.1:{port}"
    process.kill()


@pytest.fixture
def client(url: str) -> Iterator[HTTPClient]:
    client = HTTPClient({url: "a key"}, "MY_KEY", "SERVER_KEY")
    deadline = time.monotonic() + 60
    while not client.is_healthy(url) and time.monotonic() < deadline:
        time.sleep(0.1)
    yield client
    client.close()
