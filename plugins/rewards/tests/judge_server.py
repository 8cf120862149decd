"""A server of chat completions in this process, which can be told to fail in every way that servers do."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlplug_rewards.judges import Judge
from rlplug_rewards.judges.endpoint import Endpoint
from rlplug_rewards.requests.limits import RequestLimits

from rlplug.interfaces import Reward
from rlplug.rewards import RewardRunner
from rlplug.types import RewardError, Sample


def chat(text: Any, finish_reason: str = "stop", **fields: Any) -> bytes:
    """Return the body of a chat completion with one answer."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return json.dumps({"id": "1", "model": "judge", "choices": [choice], "usage": usage} | fields).encode()


class Reply:
    """One answer: a status, a body, headers; or none at all."""

    def __init__(
        self, body: bytes = b"", status: int = 200, kind: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self.body, self.status, self.kind, self.headers = body, status, kind, dict(headers or {})


DROP, HANG = Reply(kind="drop"), Reply(kind="hang")
FAULTS = {
    "rate limit": Reply(b'{"error": "slow down"}', 429, headers={"Retry-After": "0"}),
    "server error": Reply(b"oh no", 500),
    "overload": Reply(b"", 503, headers={"Retry-After": "nonsense"}),
    "dropped connection": DROP,
    "late answer": HANG,
}
"""Failures after which a judge tries again."""


class JudgeServer:
    """Answers with ``reply``, which gets the request's body and says how; ``script`` comes first, one a request."""

    def __init__(self, reply: Callable[[dict[str, Any]], Reply]) -> None:
        self.reply = reply
        self.script: list[Reply] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.models = b'{"data": []}'
        self.sent: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0
        self.gate: threading.Barrier | None = None
        self.is_closing = threading.Event()
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.answer(Reply(server.models, 401 if server.refuses_key(self.headers) else 200))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.paths.append(self.path)
                self.answer(server.next_reply(body, self.headers.get("Authorization")))
                server.done()

            def answer(self, reply: Reply) -> None:
                self.close_connection = True
                if reply.kind == "hang":
                    server.is_closing.wait(60)
                    return
                if reply.kind == "drop":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                    return
                try:
                    self.send_response(reply.status)
                    headers = {"Content-Type": "application/json", "Content-Length": str(len(reply.body))}
                    for name, value in (headers | reply.headers).items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(reply.body)
                except OSError:  # the client has hung up
                    return

        self._server = type("Server", (ThreadingHTTPServer,), {"request_queue_size": 1024})(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.needs_key: str | None = None
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def refuses_key(self, headers: Any) -> bool:
        return self.needs_key is not None and headers.get("Authorization") != f"Bearer {self.needs_key}"

    def next_reply(self, body: dict[str, Any], key: str | None) -> Reply:
        with self._lock:
            self.requests.append(body)
            self.keys.append(key)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            scripted = self.script.pop(0) if self.script else None
        if self.gate is not None:
            self.gate.wait(60)
        return scripted or self.reply(body)

    def done(self) -> None:
        with self._lock:
            self.at_once -= 1

    def close(self) -> None:
        self.is_closing.set()
        self._server.shutdown()
        self._server.server_close()

    def endpoint(self, **options: Any) -> Endpoint:
        """Return this server as a judge's endpoint, without waits; ``limits`` overrides some of its limits."""
        limits = {"first_backoff_s": 0.001, "max_backoff_s": 0.001, "max_retries": 2} | options.pop("limits", {})
        return Endpoint(self.url, "judge", **{"limits": RequestLimits(**limits)} | options)


@contextmanager
def judge_server(reply: Callable[[dict[str, Any]], Reply]) -> Iterator[JudgeServer]:
    server = JudgeServer(reply)
    try:
        yield server
    finally:
        server.close()


def said(body: dict[str, Any]) -> str:
    """Return the user's message of a request."""
    return str(body["messages"][-1]["content"])


def by_length(body: dict[str, Any]) -> Reply:
    """Score the message by its length, as a judge would that always answers alike."""
    score = 1.0 / (1 + len(said(body)))
    return Reply(chat(json.dumps({"reason": "its length", "score": score})))


def verdicts(reward: Reward, *samples: Sample) -> list[float | RewardError]:
    """Return what a run makes of samples: numbers and errors."""
    return [sample.rewards[reward.name] for sample in RewardRunner([reward]).score(samples)]


def verdict(text: str) -> Reply:
    return Reply(chat(text))


def make_judge(server: JudgeServer, template: Any, **options: Any) -> Judge:
    endpoint = {name: options.pop(name) for name in tuple(options) if name in Endpoint.__dataclass_fields__}
    return Judge(server.endpoint(**endpoint), str(template), **options)
