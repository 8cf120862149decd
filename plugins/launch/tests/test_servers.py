"""Health checks of the servers that a launcher starts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
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
