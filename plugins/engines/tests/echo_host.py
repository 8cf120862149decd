"""An engine that answers with its prompt: run as the process of ``EngineProcess`` by its tests.

Like real engines it starts a process of its own, whose id it tells as ``max_num_seqs``.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlplug_engines.engine_host import EngineHost, run_host


class EchoHost(EngineHost):
    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        super().__init__(asyncio.new_event_loop())
        self._child = child
        self._aborted: set[str] = set()
        self._has_loads = False

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Mapping[str, Any]) -> Any:
        if sampling.get("dies"):
            print("an illegal memory access", flush=True)
            os._exit(7)
        if sampling.get("fails"):
            raise ValueError("no such thing")
        while sampling.get("is_long") and request_id not in self._aborted:
            await asyncio.sleep(0.01)
        return list(prompt_ids)

    def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)

    async def loads(self) -> list[tuple[int, int, float]]:
        if not self._has_loads:
            self._has_loads = True
            raise OSError("the scheduler's memory is not there yet")
        return [(len(self._running), 0, 0.25)]

    def shutdown(self) -> None:
        self._child.kill()
        self._child.wait()

    async def call_fail(self) -> None:
        raise RuntimeError("the bucket is bad")

    async def call_sleep(self) -> None:
        await asyncio.sleep(60)


def make(arguments: dict[str, Any]) -> tuple[EngineHost, dict[str, int]]:
    if "fails" in arguments:
        raise ValueError(arguments["fails"])
    time.sleep(arguments.get("seconds", 0))
    assert "RANK" not in os.environ, "the trainer's rank is not the engine's"
    child = subprocess.Popen(["sleep", "1000"])
    return EchoHost(child), {"kv_cache_tokens": 0, "max_num_seqs": child.pid}


if __name__ == "__main__":
    run_host(make)
