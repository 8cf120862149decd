"""Servers that send each token as it is generated, for an asynchronous rollout; and environments that hang.

``python benchmarks/streaming_servers.py SETTINGS.json HOST PORT`` starts one. It is the server of ``rlplug new-plugin
--kind engine``, whose files :func:`doc_engine.write_engine` writes; their folder must be on ``PYTHONPATH``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from aiohttp import web
from my_engine import Backend, Options
from rlplug_engines.servers import PendingRequest, ServerEngine

from examples.hidden_digit.environment import HiddenDigit
from rlplug.interfaces import EngineCapabilities, StepResult
from rlplug.types import Request


class StreamingBackend(Backend):  # type: ignore[misc]
    """Reads tokens as they come."""

    def payload(self, pending: PendingRequest) -> dict[str, Any]:
        return {**super().payload(pending), "is_streamed": pending.is_streamed}

    def receive(self, pending: PendingRequest, answer: dict[str, Any]) -> None:
        pending.append(pending.field(answer, "token_ids", list), pending.field(answer, "logprobs", list))
        pending.finish_reason = pending.field(answer, "finish_reason", str, type(None))


class StreamingRollout(ServerEngine):
    """Generates in servers at URLs."""

    capabilities = EngineCapabilities(streaming=True, colocated=False, disaggregated=True)
    backend_class = StreamingBackend

    def __init__(self, urls: list[str], api_key_env: str = "MY_ENGINE_KEY", start_deadline_s: float = 120.0) -> None:
        super().__init__(Options(), None, urls, api_key_env, start_deadline_s, 120.0, 60.0)


class HungDigit(HiddenDigit):
    """The game, one in every hundred of whose answers never comes; calls are counted over all games."""

    calls: ClassVar[itertools.count[int]] = itertools.count(1)

    def step(self, completion: str) -> StepResult:
        if next(self.calls) % 100 == 0:
            time.sleep(3600)
        return super().step(completion)


def serve(settings: Path, host: str, port: int) -> None:
    """Serve until the process ends."""
    import my_server

    class Server(my_server.Server):  # type: ignore[misc, name-defined]
        async def generate(self, request: web.Request) -> web.StreamResponse:
            asked = await request.json()
            if not asked["is_streamed"]:
                return await super().generate(request)  # type: ignore[no-any-return]
            response = web.StreamResponse()
            await response.prepare(request)
            prompt_ids, finish_reason = list(asked["prompt_ids"]), None
            for number in range(asked["max_tokens"]):
                one = Request("", tuple(prompt_ids), asked["seed"] + number, 1)
                completion = await self.batched(one, tuple(asked["sampling"]))
                prompt_ids += completion.token_ids.tolist()
                if completion.finish_reason != "length" or number == asked["max_tokens"] - 1:
                    finish_reason = completion.finish_reason
                event = {"token_ids": completion.token_ids.tolist(), "logprobs": completion.logprobs.tolist()}
                await response.write(json.dumps(event | {"finish_reason": finish_reason}).encode() + b"\n")
                if finish_reason is not None:
                    break
            return response

        async def batched(self, request: Request, sampling: tuple[float, float, int]) -> Any:
            """Return the completion of a request that runs with the others of the next 20 ms."""
            if sampling not in self.batches:
                self.batches[sampling] = [], asyncio.create_task(self.generate_batch(sampling))
            batch, completions = self.batches[sampling]
            batch.append(request)
            index = len(batch) - 1
            return (await completions)[index]

    app = web.Application(middlewares=[my_server.require_key])
    server = Server(json.loads(settings.read_text()))
    app.add_routes([web.get(f"/{name}", getattr(server, name)) for name in ("health", "info")])
    posts = ("generate", "join", "receive_weights", "finish")
    app.add_routes([web.post(f"/{name}", getattr(server, name)) for name in posts])
    web.run_app(app, host=host, port=port, print=None)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
