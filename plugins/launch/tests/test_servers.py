"""Health checks of the servers that a launcher starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rlplug_launch import listener
from rlplug_launch.servers import is_healthy


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Give the URL of a port that answers one request."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/health"
        thread.join(10)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.1 302 Found\r\nLocation: data:,\r\nContent-Length: 0\r\n\r\n", False),
        (b"\x00\x01 no HTTP\r\n", False),
        (b"", False),
    ],
)
def test_health_is_what_the_server_itself_answers(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, expected: bool
) -> None:
    """It catches a check that asks the proxy of ``http_proxy``, and one that an answer without HTTP ends."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody listens
    with answering(answer) as url:
        assert is_healthy(url) == expected


@pytest.mark.parametrize("elsewhere", ["127.0.0.2", "::1", "::"])
def test_a_server_is_known_by_its_own_process_at_its_address(tmp_path: Path, elsewhere: str) -> None:
    """Catches a neighbour, who took the port before the server bound it, being listed and handed the key.

    Also where the server does listen on that port, of another address: one whose command lacks ``{host}``.
    """
    go, file = tmp_path / "go", tmp_path / "listens"
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
        code = f"""
import os, socket, time
family = socket.AF_INET6 if ":" in {elsewhere!r} else socket.AF_INET
other = socket.create_server(({elsewhere!r}, {port}), family=family)  # an IPv6 socket that is IPv6's alone
open({str(tmp_path / "started")!r}, "w").write(str(os.getpid()))
while not os.path.exists({str(go)!r}):
    time.sleep(0.05)
with socket.create_server(("127.0.0.1", {port})):
    time.sleep(600)
"""
        command = [sys.executable, "-m", listener.__name__, "127.0.0.1", str(port), str(file), "token"]
        server = subprocess.Popen([*command, sys.executable, "-c", code])
        try:
            wait_for(tmp_path / "started")
            time.sleep(5 * listener.POLL_S)
            assert not file.exists()
            squatter.close()
            go.touch()
            wait_for(file)
            assert file.read_text() == "token"
            assert int((tmp_path / "started").read_text()) == server.pid
        finally:
            server.kill()
            server.wait()


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 120
    while not (file.exists() and os.path.getsize(file)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert file.exists()
