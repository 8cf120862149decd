"""The child process of :class:`rlplug_engines.workers.WorkerEngine`: batches requests for a worker.

``python -m rlplug_engines.workers.host DESCRIPTOR`` serves until the trainer closes it, or ends.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from rlplug.types import Request, SamplingParams
from rlplug_engines.engine_host import EngineHost, run_host
from rlplug_engines.flat_buckets import FlatTensor, tensors_of
from rlplug_engines.workers.worker import Answer, Worker

GATHER_S: Final = 0.005
"""How long requests are gathered for a batch, in seconds, while the worker has nothing to do."""


class WorkerHost(EngineHost):
    """Hands batches of requests with the same sampling to a worker, one after another.

    Args:
        worker: The author's part.
        max_batch_size: Most requests of a batch.
    """

    def __init__(self, worker: Worker, max_batch_size: int) -> None:
        super().__init__(asyncio.new_event_loop())
        self._worker = worker
        self._max_batch_size = max_batch_size
        self._busy = asyncio.Lock()
        self._gathered: dict[SamplingParams, tuple[list[Request], asyncio.Task[Sequence[Answer]]]] = {}

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Mapping[str, Any]) -> Any:
        key: SamplingParams = sampling["sampling"]
        if key not in self._gathered or len(self._gathered[key][0]) == self._max_batch_size:
            batch: list[Request] = []
            self._gathered[key] = batch, asyncio.create_task(self._run(key, batch))
        batch, answers = self._gathered[key]
        index = len(batch)
        batch.append(Request(request_id, tuple(prompt_ids), sampling["seed"], sampling["max_tokens"]))
        token_ids, logprobs = (await answers)[index]
        return list(map(int, token_ids)), list(map(float, logprobs))

    async def _run(self, key: SamplingParams, batch: list[Request]) -> Sequence[Answer]:
        """Generate a batch, which grows until its turn comes."""
        await asyncio.sleep(GATHER_S)
        async with self._busy:
            if key in self._gathered and self._gathered[key][0] is batch:
                del self._gathered[key]
            longest = max(request.max_new_tokens or 1 for request in batch)
            sampling = replace(key, max_new_tokens=longest)
            answers = await asyncio.to_thread(self._worker.generate, tuple(batch), sampling)
        if len(answers) != len(batch):
            raise ValueError(f"{type(self._worker).__name__} gave {len(answers)} answers to {len(batch)} requests")
        return answers

    async def call_load(self, path: str, places: Sequence[FlatTensor]) -> None:
        """Load a bucket that lies in a file which both processes map."""
        flat = torch.from_file(path, shared=True, size=places[-1].end, dtype=torch.uint8)
        async with self._busy:
            await asyncio.to_thread(self._worker.load, tensors_of(flat, places))

    async def call_finish_sync(self) -> None:
        """Have the worker use the new weights."""
        async with self._busy:
            await asyncio.to_thread(self._worker.finish_sync)

    def abort(self, request_id: str) -> None:
        """Let the batch end by itself: a worker has no call for this."""

    async def loads(self) -> Sequence[tuple[int, int, float]]:
        """Return no load: a worker has no scheduler."""
        return ()

    def shutdown(self) -> None:
        """Leave it to the end of the process."""


def make(arguments: dict[str, Any]) -> tuple[EngineHost, dict[str, int]]:
    """Build the worker that the trainer describes."""
    sys.path[:] = arguments["path"]
    module, name = arguments["worker"]
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    max_batch_size = arguments["max_batch_size"]
    worker = found(arguments["policy"], torch.device(arguments["device"]), **arguments["options"])
    return WorkerHost(worker, max_batch_size), {"max_num_seqs": max_batch_size, "kv_cache_tokens": 0}


if __name__ == "__main__":
    run_host(make)
