"""A double of SGLang's server, for what a client does: no model, and the routes as SGLang's sources have them.

python server_double.py PORT SETTINGS.json

A completion counts up from the sum of its prompt and its seed. Weights arrive over gloo, in a group that is made with
the same calls of torch as ``init_custom_process_group`` of SGLang makes its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

TOKENS = 40
TOKENS_PER_EVENT = 8


def join(meeting: dict[str, Any]) -> Any:
    """Do what ``init_custom_process_group`` does: the same in 0.5.13 and 0.5.23."""
    url = f"tcp://{meeting['master_address']}:{meeting['master_port']}"
    store, rank, size = next(rendezvous(url, meeting["rank_offset"], meeting["world_size"]))
    name = meeting["group_name"]
    made = _new_process_group_helper(
        size,
        rank,
        [],
        Backend(meeting["backend"]),
        PrefixStore(name, store),
        group_name=name,
        backend_options=None,
        timeout=dist.default_pg_timeout,
        device_id=None,
    )
    _world.pg_group_ranks[made[0]] = {member: member for member in range(size)}
    return made[0]


class Double:
    """The state of a server."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.weight_version = "default"
        self.weights: dict[str, torch.Tensor] = {}
        self.groups: dict[str, Any] = {}
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.calls: list[str] = []
        self.in_session = bool(settings.get("left_open"))

    # ---- what a trainer asks ----------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        name, prompt, sampling = asked["rid"], asked["input_ids"], asked["sampling_params"]
        count = sampling["max_new_tokens"]
        first = sum(prompt) + sampling["sampling_seed"]
        token_ids = [(first + index) % TOKENS for index in range(count)]
        self.running.add(name)
        try:
            if not asked["stream"]:
                await asyncio.sleep(self.settings.get("seconds", 0.0))
                return web.json_response(self.answer(prompt, token_ids, 0, count))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for start in range(0, count, TOKENS_PER_EVENT):
                await asyncio.sleep(self.settings.get("seconds_per_event", 0.0))
                event = self.answer(prompt, token_ids, start, min(start + TOKENS_PER_EVENT, count))
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            if name not in self.aborted or not self.settings.get("slow_abort"):
                self.running.discard(name)

    def answer(self, prompt: list[int], token_ids: list[int], start: int, end: int) -> dict[str, Any]:
        is_done = end == len(token_ids)
        return {
            "output_ids": token_ids[start:end],
            "meta_info": {
                "finish_reason": {"type": "length", "length": end} if is_done else None,
                "prompt_tokens": len(prompt),
                "weight_version": self.settings.get("said_version", self.weight_version),
                "num_retractions": 1,
                "cached_tokens": len(prompt) - 1,
                "output_token_logprobs": [[-token / 10 - 1, token, None] for token in token_ids[start:end]],
            },
        }

    async def abort_request(self, request: web.Request) -> web.Response:
        name = (await request.json())["rid"]
        self.aborted.append(name)
        if self.settings.get("slow_abort"):
            asyncio.get_running_loop().call_later(0.3, self.running.discard, name)
        return web.Response()

    # ---- weights ----------------------------------------------------------------------------------------------------

    async def init_weights_update_group(self, request: web.Request) -> web.Response:
        meeting = await request.json()
        self.groups[meeting["group_name"]] = await asyncio.to_thread(join, meeting)
        return said(True, "")

    async def update_weights_from_distributed(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if self.settings.get("dies_in_sync"):
            os._exit(3)
        if self.settings.get("has_sessions") and not self.in_session:
            return said(False, "update_weights_from_distributed must run between begin_weight_update() and end")
        if asked["flush_cache"]:
            return said(False, "the double is asked to flush once, at the end")
        group = self.groups[asked["group_name"]]
        self.weights |= await asyncio.to_thread(receive, asked, group)
        self.weight_version = asked["weight_version"]
        return said(True, "")

    async def begin_weight_update(self, _: web.Request) -> web.Response:
        was, self.in_session = self.in_session, True
        return said(not was, "a weight-update session is already open" if was else "")

    async def end_weight_update(self, _: web.Request) -> web.Response:
        was, self.in_session = self.in_session, False
        return said(was, "" if was else "no weight-update session is open")

    async def destroy_weights_update_group(self, request: web.Request) -> web.Response:
        group = self.groups.pop((await request.json())["group_name"], None)
        return said(group is not None, "The group to be destroyed does not exist.")

    async def flush_cache(self, request: web.Request) -> web.Response:
        for _ in range(int(float(request.query["timeout"]) / 0.05)):
            if not self.running:
                return web.Response(text="Cache flushed.")
            await asyncio.sleep(0.05)
        return web.Response(status=400, text="Flush cache failed.")

    # ---- what it says of itself -------------------------------------------------------------------------------------

    async def server_info(self, _: web.Request) -> web.Response:
        info = {
            "version": "0.5.16",
            "skip_tokenizer_init": True,
            "incremental_streaming_output": True,
            "sampling_backend": "rlplug",
            "dp_size": 1,
            "pp_size": 1,
            "tp_size": 1,
            "speculative_algorithm": None,
            "json_model_override_args": "{}",
            "max_req_input_len": 2050,  # of a context of 2048 + 8, as the plugin asks for
            "max_total_num_tokens": 10_000,
            "chunked_prefill_size": -1,
            "disable_cuda_graph": True,
            "cuda_graph_max_bs": 160,
            "internal_states": [{"effective_max_running_requests_per_dp": 64}],
        }
        return web.json_response(info | self.settings.get("info", {}))

    async def loads(self, _: web.Request) -> web.Response:
        load = {"num_running_reqs": len(self.running), "num_waiting_reqs": 2, "token_usage": 0.25}
        return web.json_response({"loads": [load]})

    async def state(self, _: web.Request) -> web.Response:
        """What a test wants to know; SGLang has no such route."""
        return web.json_response(
            {
                "sums": {name: float(weight.double().sum()) for name, weight in self.weights.items()},
                "aborted": self.aborted,
                "running": [*self.running],
                "calls": self.calls,
                "groups": len(self.groups),
                "in_session": self.in_session,
            }
        )


def receive(asked: dict[str, Any], group: Any) -> dict[str, torch.Tensor]:
    """Take a bucket as ``update_weights_from_distributed`` of SGLang does."""
    weights, handles = {}, []
    for name, dtype, shape in zip(asked["names"], asked["dtypes"], asked["shapes"], strict=True):
        weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        handles.append(dist.broadcast(weights[name], src=0, group=group, async_op=True))
    for handle in handles:
        handle.wait()
    return weights


def said(success: bool, message: str) -> web.Response:
    return web.json_response({"success": success, "message": message}, status=200 if success else 400)


def main() -> None:
    port, settings = int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    double = Double(settings)
    # torch's calls on a group want a default group, which a scheduler of SGLang has
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    @web.middleware
    async def guarded(request: web.Request, handler: Any) -> web.StreamResponse:
        is_open = request.path.startswith(("/health", "/state"))
        if not is_open and request.headers.get("Authorization") != f"Bearer {settings['key']}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.method == "POST":
            double.calls.append(request.path)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(middlewares=[guarded])
    posts = ["generate", "abort_request", "init_weights_update_group", "update_weights_from_distributed"]
    posts += ["destroy_weights_update_group", "flush_cache"]
    posts += ["begin_weight_update", "end_weight_update"] if settings.get("has_sessions") else []
    app.add_routes([web.post(f"/{name}", getattr(double, name)) for name in posts])
    app.add_routes([web.get("/server_info", double.server_info), web.get("/v1/loads", double.loads)])
    app.add_routes([web.get("/health", health), web.get("/state", double.state)])
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main()
