"""A double of SGLang's ``Engine`` under the real host: run as the process of ``EngineProcess`` by its tests.

It generates nothing: a completion counts up from its prompt's last token, one token each 10 ms. A prompt that begins
with ``DIES`` ends the process, one that begins with ``FAILS`` raises. It starts a process of its own, as SGLang does.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import types
from typing import Any

from rlplug_rollout_sglang import host

DIES, FAILS = 100, 101


class TokenizerManager:
    """The calls that the host makes of SGLang's."""

    def __init__(self) -> None:
        self.aborted: set[str] = set()
        self.known: set[str] = set()
        self.version = "default"
        self.calls: list[str] = []

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.aborted |= {rid} & self.known

    async def get_loads(self) -> list[Any]:
        return [types.SimpleNamespace(num_running_reqs=3, num_waiting_reqs=1, token_usage=0.25)]

    async def update_weights_from_tensor(self, request: Any) -> tuple[bool, str]:
        if request.serialized_named_tensors == [b"bad"]:
            return False, "the bucket is bad"
        self.version = request.weight_version
        return True, "Success"

    async def flush_cache(self, timeout_s: float) -> Any:
        return types.SimpleNamespace(success=not self.known, message="")

    async def release_memory_occupation(self, request: Any) -> None:
        await asyncio.sleep(60)


class Engine:
    """What the host uses of SGLang's."""

    def __init__(self, **arguments: Any) -> None:
        self.tokenizer_manager = TokenizerManager()
        self.loop = asyncio.new_event_loop()
        self._child = subprocess.Popen(["sleep", "1000"])
        assert os.environ["RLPLUG_SGLANG_SAMPLER"] == "1"

    def get_server_info(self) -> dict[str, Any]:
        state = {"effective_max_running_requests_per_dp": self._child.pid}
        return {
            "max_total_num_tokens": 5000,
            "internal_states": [state],
            "chunked_prefill_size": 8192,
            "disable_cuda_graph": False,
            "cuda_graph_bs": [1, 2, 160],
        }

    async def async_generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], return_logprob: bool, rid: str
    ) -> dict[str, Any]:
        if input_ids[0] == DIES:
            print("CUDA error: an illegal memory access", file=sys.stderr, flush=True)
            os._exit(7)
        if input_ids[0] == FAILS:
            raise ValueError("no such thing")
        await asyncio.sleep(0.05)  # until then an abort is not heard
        self.tokenizer_manager.known.add(rid)
        made = 0
        while made < sampling_params["max_new_tokens"] and rid not in self.tokenizer_manager.aborted:
            await asyncio.sleep(0.01)
            made += 1
        self.tokenizer_manager.known.discard(rid)
        token_ids = [input_ids[-1] + place + 1 for place in range(made)]
        reason = "abort" if rid in self.tokenizer_manager.aborted else "length"
        about = {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [(-1.0, token, None) for token in token_ids],
            "weight_version": self.tokenizer_manager.version,
            "prompt_tokens": len(input_ids),
            "cached_tokens": len(input_ids) - 1,
            "num_retractions": 0,
            "more": "that nobody wants",
        }
        return {"output_ids": token_ids, "meta_info": about}

    def shutdown(self) -> None:
        self._child.kill()
        self._child.wait()


if __name__ == "__main__":
    requests = types.SimpleNamespace(
        UpdateWeightsFromTensorReqInput=types.SimpleNamespace,
        ReleaseMemoryOccupationReqInput=types.SimpleNamespace,
    )
    names: dict[str, Any] = {
        "sglang.srt.entrypoints.engine": types.SimpleNamespace(Engine=Engine),
        "sglang.srt.managers.io_struct": requests,
    }
    for package in ("sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.managers"):
        names[package] = types.ModuleType(package)
    sys.modules.update(names)
    host.main()
