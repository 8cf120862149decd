"""Runs verifiers by itself: its own client against an API on this machine that answers with given completions.

Standard input: a JSON object with ``environment``, ``arguments`` and ``rollouts``, each an ``example`` and the
``completions`` that the API gives, as chat messages. Prints one JSON object a rollout.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import verifiers as vf
from verifiers.types import ClientConfig


class API(BaseHTTPRequestHandler):
    """Chat completions, the next one at each request."""

    script: ClassVar[list[dict]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = self.script.pop(0)
        body = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    job = json.load(sys.stdin)
    server = ThreadingHTTPServer(("127.0.0.1", 0), API)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["ORACLE_KEY"] = "none"
    config = ClientConfig(api_base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key_var="ORACLE_KEY")
    environment = vf.load_environment(job["environment"], **job["arguments"])
    results = []
    for rollout in job["rollouts"]:
        API.script = list(rollout["completions"])
        output = asyncio.run(environment.run_rollout(rollout["example"], config, "policy", {}))
        completion = [
            message if isinstance(message, dict) else message.model_dump() for message in output["completion"]
        ]
        results.append({"reward": output["reward"], "metrics": output["metrics"], "completion": completion})
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
