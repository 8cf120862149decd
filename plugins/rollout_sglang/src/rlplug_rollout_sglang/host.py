"""The process that SGLang runs in: started by :mod:`rlplug_rollout_sglang.engine_process`, which it talks to.

SGLang wants a process of its own. When one of its children fails, or when it shuts down, it kills every process below
the one that it is in; it changes signal handlers, the environment, and how processes are started. All that is well in
this process, which has no other purpose, and ends when its trainer does.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, TypeAlias

import psutil

Message: TypeAlias = tuple[Any, ...]
"""A kind and its values. To here: ``submit``, ``abort``, ``call``, ``close``. From here: ``ready``, ``failed``,
``output``, ``load``, ``result``."""

LOAD_INTERVAL_S: Final = 1.0
ABORT_INTERVAL_S: Final = 0.2
IDLE_TIMEOUT_S: Final = 60.0
KEPT: Final = frozenset(
    {
        *("finish_reason", "output_token_logprobs", "weight_version"),
        *("prompt_tokens", "cached_tokens", "num_retractions"),
    }
)
"""What :class:`rlplug_rollout_sglang.sampling.Output` reads of what SGLang says about a completion."""

ALL_MEMORY: Final = ["kv_cache", "weights", "cuda_graph"]


def main() -> None:
    """Make the engine that the first message describes, and serve until the trainer closes it, or ends."""
    connection: Connection[Message, Any] = Connection(int(sys.argv[1]))
    arguments: dict[str, Any] = connection.recv()
    arrivals: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, arrivals.put), daemon=True).start()
    try:
        from sglang.srt.entrypoints.engine import Engine

        engine = Engine(**arguments)
        about = engine.get_server_info()
        max_num_seqs = about["internal_states"][0]["effective_max_running_requests_per_dp"]
        connection.send(("ready", {"kv_cache_tokens": about["max_total_num_tokens"], "max_num_seqs": max_num_seqs}))
    except Exception as problem:
        traceback.print_exc()
        connection.send(("failed", f"{type(problem).__name__}: {problem}"))
        raise SystemExit(1) from problem
    engine.loop.run_until_complete(Host(engine, connection.send).serve(arrivals))
    engine.shutdown()
    os._exit(0)  # threads of SGLang and tasks of its loop need not end one by one


def _read(connection: Connection[Message, Any], put: Callable[[Message | None], None]) -> None:
    """Hand on what arrives; when the trainer is gone, end all of SGLang, whatever it does."""
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            own = psutil.Process()
            for process in [*own.children(recursive=True), own]:
                process.kill()
            return
        put(message)


class Host:
    """Hands messages to an engine, and its answers back. All but the reading happens in the engine's event loop.

    Args:
        engine: SGLang's ``Engine``.
        send: Sends a message to the trainer.
    """

    def __init__(self, engine: Any, send: Callable[[Message], None]) -> None:
        self._engine = engine
        self._tokenizer: Any = engine.tokenizer_manager
        self._outgoing: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._send = send
        self._running: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, arrivals: queue.SimpleQueue[Message | None]) -> None:
        """Do what messages ask for, until one says ``close``."""
        threading.Thread(target=self._write, daemon=True).start()
        self._start(self._observe())
        while True:
            message = await asyncio.to_thread(arrivals.get)
            assert message is not None
            kind, *values = message
            if kind == "close":
                return
            if kind == "submit":
                for request_id, prompt_ids, sampling in values[0]:
                    self._running.add(request_id)
                    self._start(self._generate(request_id, prompt_ids, sampling))
            elif kind == "abort":
                for request_id in values[0]:
                    self._start(self._abort(request_id))
            else:
                assert kind == "call", kind
                number, name, arguments = values
                self._start(self._call(number, name, arguments))

    def _write(self) -> None:
        """Send in a thread: a trainer that does not read must not keep the engine's loop from its work."""
        while True:
            self._send(self._outgoing.get())

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._tasks.discard)

    # ---- requests -------------------------------------------------------------------------------------------------

    async def _generate(self, request_id: str, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> None:
        try:
            answer = await self._engine.async_generate(
                input_ids=list(prompt_ids), sampling_params=sampling, return_logprob=True, rid=request_id
            )
            about = {name: value for name, value in answer["meta_info"].items() if name in KEPT}
            self._outgoing.put(("output", request_id, {"output_ids": answer["output_ids"], "meta_info": about}, None))
        except Exception as problem:  # noqa: BLE001 - the trainer hears of it
            self._outgoing.put(("output", request_id, None, f"{type(problem).__name__}: {problem}"))
        finally:
            self._running.discard(request_id)

    async def _abort(self, request_id: str) -> None:
        """Stop a request. SGLang ignores an abort that overtakes its request, so it is told until that has ended."""
        while request_id in self._running:
            await asyncio.sleep(0)
            self._tokenizer.abort_request(rid=request_id)
            await asyncio.sleep(ABORT_INTERVAL_S)

    async def _observe(self) -> None:
        """Report the scheduler's load while there are requests; SGLang keeps it in shared memory."""
        while True:
            if self._running:
                for load in await self._tokenizer.get_loads():
                    about = (load.num_running_reqs, load.num_waiting_reqs, load.token_usage)
                    self._outgoing.put(("load", *about))
            await asyncio.sleep(LOAD_INTERVAL_S)

    # ---- calls ----------------------------------------------------------------------------------------------------

    async def _call(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        problem: str | None = None
        try:
            await getattr(self, f"call_{name}")(*arguments)
        except Exception as error:  # noqa: BLE001 - likewise
            problem = f"{type(error).__name__}: {error}"
        self._outgoing.put(("result", number, problem))

    async def call_begin_update(self) -> None:
        """Get ready for new weights; older versions need no such call, and have none."""
        if not hasattr(self._tokenizer, "begin_weight_update"):
            return
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        _require(await self._tokenizer.begin_weight_update(BeginWeightUpdateReqInput()))

    async def call_update_weights(self, payloads: list[bytes], version: str) -> None:
        """Load a bucket, of which each tensor-parallel rank has a serialised handle in ``payloads``."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format="flattened_bucket", flush_cache=False, weight_version=version
        )
        _require(await self._tokenizer.update_weights_from_tensor(request))

    async def call_end_update(self) -> None:
        """Put new weights into the form that kernels read, and forget what was computed with the former ones."""
        if hasattr(self._tokenizer, "end_weight_update"):
            from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

            _require(await self._tokenizer.end_weight_update(EndWeightUpdateReqInput()))
        await self._flush()

    async def call_release(self) -> None:
        """Give all memory back. A scheduler that is told so while it works fails; to flush is to wait for it."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._flush()
        await self._tokenizer.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=ALL_MEMORY))

    async def call_resume(self, tags: list[str]) -> None:
        """Take memory again."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._tokenizer.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))

    async def _flush(self) -> None:
        answer = await self._tokenizer.flush_cache(timeout_s=IDLE_TIMEOUT_S)
        _require((answer.success, f"the cache was not flushed: {answer.message or 'requests still run'}"))


def _require(answer: tuple[bool, str]) -> None:
    success, message = answer
    if not success:
        raise RuntimeError(message)
